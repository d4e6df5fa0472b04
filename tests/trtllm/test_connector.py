"""TensorRT-LLM's executor, stood in for, on kvtier: right bytes, fewer tokens computed, and nothing left behind."""

import importlib
import json
import random
import re
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, Final

import pytest

from kvtier import Client, Hint, InvalidArgument
from kvtier.connectors import trtllm
from tests.integration.daemon import DaemonProcess
from tests.integration.test_engine import held as held_leases
from tests.integration.waiting import eventually
from tests.trtllm.executor import Answer, Executor, Request, State
from tests.trtllm.interface import CONNECTORS, Owner, Ranks, standing_in
from tests.trtllm.model import GroupedPool, Model
from tests.trtllm.traffic import SHARED, TAILS, ask, outputs

V1: Final = Model()
V2: Final = Model(windows=(0, 20, 20, 0), index=True)
PAGE: Final = Path(__file__).parents[2] / "docs/engines.md"
CONFIGURED: Final = re.findall(r"^  connector_\w+: (\S+)$", PAGE.read_text(), re.MULTILINE)
"""Module, scheduler and worker, as the page tells a reader to write them."""
SPACE: Final = {"host_bytes": 8 << 20, "disk_bytes": 16 << 20, "pin_wait": 5.0}
SYNC: Final = {"async_blocks": 1000, **SPACE}
ASYNC: Final = {"async_blocks": 1, **SPACE}

CUTS: Final = (Answer(), Answer(short=8), Answer(short=999), Answer(reset=True))

both_models = pytest.mark.parametrize("model", [V1, V2], ids=["v1", "v2"])
both_ways = pytest.mark.parametrize("way", [SYNC, ASYNC], ids=["sync", "async"])


@contextmanager
def engine(
    daemon: DaemonProcess,
    model: Model,
    way: Mapping[str, Any],
    *,
    ranks: int = 1,
    owner: int | None = None,
    worker: Any = None,
    cache: Mapping[str, Any] = MappingProxyType({}),
    **how: Any,
) -> Iterator[Executor]:
    """One engine instance, which ends with the block. ``owner``: it is this rank of attention data parallelism."""
    args = llm_args(model, **cache)
    if how.get("drafts"):
        args.speculative_config = SimpleNamespace(max_draft_len=how["drafts"])
    args.enable_attention_dp = owner is not None
    stand_in = Ranks(ranks) if owner is None else Owner(owner)
    with standing_in(stand_in) as interface, pytest.MonkeyPatch.context() as patch:
        patch.setenv(trtllm.OPTIONS, json.dumps({"address": daemon.address, **way}))
        module, *classes = CONFIGURED
        scheduler, configured = (getattr(importlib.import_module(module), each) for each in classes)
        executor = Executor(model, (scheduler, worker or configured), args, ranks=interface, grouped=model.index, **how)
        try:
            yield executor
        finally:
            for each in (*executor.workers, executor.scheduler):
                each.close()
            executor.close()


def llm_args(model: Model, **cache: Any) -> SimpleNamespace:
    config = {"tokens_per_block": model.tokens_per_block, "dtype": "auto", "max_attention_window": None}
    return SimpleNamespace(
        model="tiny", kv_cache_config=SimpleNamespace(**{**config, **cache}), speculative_config=None
    )


def computed(
    daemon: DaemonProcess, model: Model, way: Mapping[str, Any], *, seed: int = 1, **how: Any
) -> tuple[Executor, Sequence[Request]]:
    """An engine that has ended, and the requests that it has answered."""
    with engine(daemon, model, way, reuse=False, seed=seed, **how) as first:
        cold = ask(first)
        first.run()
    return first, cold


def full_blocks(model: Model, requests: Sequence[Request]) -> int:
    """Tokens that need not be computed where all of it is stored: full blocks before the last token."""
    return sum((each.prompt - 1) // model.tokens_per_block * model.tokens_per_block for each in requests)


def held(daemon: DaemonProcess) -> int:
    """Slots under a lease, but for blank ones that a living engine has in advance."""
    with Client(daemon.address) as client:
        tiers = [tier for cache in client.stats().caches for tier in cache.tiers]
        return sum(tier.held - tier.blank + tier.orphaned for tier in tiers)


@both_models
@both_ways
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_new_engine_loads_what_the_first_has_computed(daemon, model, way, ranks):
    first, cold = computed(daemon, model, way, ranks=ranks)
    second, warm = computed(daemon, model, way, ranks=ranks, seed=2)
    assert outputs(warm) == outputs(cold)
    assert second.computed == sum(each.prompt for each in warm) - full_blocks(model, warm) < first.computed


async def test_a_conversation_of_the_engine_is_a_target_of_hints(daemon):
    with engine(daemon, V1, SYNC, seed=1) as first, Client(daemon.address) as client:
        first.submit(SHARED).py_conversation_params = SimpleNamespace(conversation_id="agent-7")
        first.run()
        (cache,) = client.caches()
        opened = client.open_cache(cache.name, cache.spec)
        (told,) = await eventually(lambda: opened.hint(Hint("end", "agent-7")), lambda told: told[0].blocks)
        assert told.blocks == (len(SHARED) + 3) // V1.tokens_per_block


@both_models
def test_ranks_of_attention_data_parallelism_share_a_cache(daemon, model):
    """No rank waits for another, and each plans for itself."""
    _, cold = computed(daemon, model, SYNC, owner=0)
    second, warm = computed(daemon, model, SYNC, owner=1, seed=2)
    assert all(type(each).supports_attention_dp for each in (second.scheduler, *second.workers))
    assert outputs(warm) == outputs(cold)
    assert second.computed == sum(each.prompt for each in warm) - full_blocks(model, warm)


@pytest.mark.parametrize(
    ("sizes", "host", "disk"),
    [
        ({"max_tokens": 65}, 9, 9),
        ({"max_tokens": 64, "host_bytes": 4 << 20, "disk_bytes": 5 * 4096}, 8, 5),
        ({"max_tokens": 1 << 30, "host_bytes": 7 * 4096, "disk_bytes": 5 * 4096}, 7, 5),
    ],
    ids=["tokens-alone", "fewer-tokens", "fewer-bytes"],
)
def test_the_least_of_tokens_and_bytes_is_the_budget(daemon, sizes, host, disk):
    """A block has 8 tokens, and a record of 4096 bytes."""
    with engine(daemon, V1, {"pin_wait": 5.0, **sizes}), Client(daemon.address) as client:
        (cache,) = client.caches()
        assert [tier.capacity for tier in client.stats().caches[0].tiers] == [host, disk], cache


def test_a_layout_without_replicated_regions(daemon):
    """As V2's first versions describe it."""
    model = Model(windows=(0, 0), index=True)

    def worker(args: Any) -> Any:
        made = trtllm.KvtierWorker(args)
        register = made.register_kv_cache_layout

        def register_early(layout: Any) -> None:
            groups = [SimpleNamespace(window_size=None, regions=group.regions) for group in layout.groups]
            register(SimpleNamespace(tokens_per_block=layout.tokens_per_block, groups=groups))

        made.register_kv_cache_layout = register_early
        return made

    with engine(daemon, model, SYNC, worker=worker), Client(daemon.address) as client:
        assert [len(cache.spec.groups[0].pools) for cache in client.caches()] == [1]


def test_saves_that_wait_for_slots_read_no_page_that_is_gone(daemon):
    """Pages behind a window are taken back while a save waits, also when the request is over."""
    scarce = {**ASYNC, "reserve_blocks": 1, "host_bytes": 16 * 2 * 8192, "load_timeout": 0.3}
    with engine(daemon, V2, scarce, reuse=False, seed=1, chunk=40) as first:
        cold = [first.submit(SHARED + tail, new=new, salt=salt) for salt in "abcd" for tail in TAILS for new in (1, 9)]
        first.run()
    with engine(daemon, V2, scarce, reuse=False, seed=2) as second:
        warm = [second.submit(each.tokens[: each.prompt], salt=each.cache_salt) for each in cold]
        second.run()
    assert [each.output[:1] for each in warm] == [each.output[:1] for each in cold]
    assert second.computed < first.computed


@both_models
@both_ways
def test_an_engine_with_a_cache_of_its_own_takes_the_rest_from_kvtier(daemon, model, way):
    """Blocks in part, offers that are cut, and requests that begin anew come with it."""
    with engine(daemon, model, way, seed=1, reuse=False) as first:
        cold = ask(first)
        first.answers = {each.request_id: Answer(reset=True) for each in cold if model.index}
        first.run()
    with engine(daemon, model, way, seed=2, pages=16) as second:
        warm = ask(second)
        second.answers = {each.request_id: how for each, how in zip(warm, CUTS if model.index else (), strict=False)}
        second.run()
    assert outputs(warm) == outputs(cold)
    assert second.computed < first.computed / 2


@both_ways
@pytest.mark.parametrize("seed", range(4))
def test_the_engine_takes_any_range_of_an_offer(daemon, way, seed):
    """It asks before its own cache has the front of what it takes in the end, and has no pages for the rest."""
    draw = random.Random(seed)
    first, cold = computed(daemon, V2, way)
    with engine(daemon, V2, way, seed=2 + seed, pages=16) as second:
        warm = ask(second)
        second.answers = {
            each.request_id: Answer(early=draw.choice((0, 3, 8, 21, 99)), short=draw.choice((0, 0, 5, 8, 30)))
            for each in warm
        }
        second.run()
    assert outputs(warm) == outputs(cold)
    assert second.computed < first.computed


def test_an_engine_that_counts_on_what_it_has_cancelled_ends(daemon):
    """Before it computes on pages that nobody has written."""
    computed(daemon, V2, ASYNC)
    with engine(daemon, V2, ASYNC, seed=2, reuse=False) as second:
        for each in ask(second):
            second.answers[each.request_id] = Answer(short=8, believed=True)
        with pytest.raises(RuntimeError, match="left out"):
            second.run()


@pytest.mark.parametrize("model", [V1, V2, Model(index=True)], ids=["v1", "v2", "v2-full"])
@both_ways
def test_pages_of_rejected_drafts_are_not_believed(daemon, model, way):
    """The next engine goes on with the chat: the answers are part of its prompts. They are saved with the step after
    their end."""
    with engine(daemon, model, way, seed=1, reuse=False, drafts=5, pages=99) as first:
        cold = [first.submit(SHARED + tail, new=24, salt="x") for tail in TAILS]
        first.submit(SHARED, new=60)
        first.run()
    with engine(daemon, model, way, seed=2, reuse=False, drafts=5, pages=40) as second:
        warm = [second.submit(each.tokens, new=2, salt="x") for each in cold]
        second.run()
    loaded = sum(each.prompt for each in warm) - second.computed
    stored = full_blocks(model, warm)
    if model is V2:  # pages that a window has left are gone at the end
        stored = sum(each.prompt // model.tokens_per_block * model.tokens_per_block for each in cold)
    assert loaded >= stored


@pytest.mark.parametrize(("drafts", "loaded"), [(0, 32), (5, 24)], ids=["plain", "drafts"])
def test_with_drafts_a_block_also_needs_its_next_token(daemon, drafts, loaded):
    """Draft layers look at it."""
    one, other = (SHARED[:32] + (last,) * 5 for last in (1, 2))
    with engine(daemon, V2, SYNC, reuse=False, seed=1, drafts=drafts) as first:
        first.submit(one)
        first.run()
    for prompt, saved in ((one, 32), (other, loaded)):
        with engine(daemon, V2, {**SYNC, "save_decode": False}, reuse=False, seed=2, drafts=drafts) as second:
            second.submit(prompt)
            second.run()
        assert second.computed == len(prompt) - saved


async def test_what_another_host_has_computed_is_there_for_the_next_request(start_fresh, tmp_path):
    (tmp_path / "store").mkdir()
    remote = f'{{"url": "file://{tmp_path}/store", "write": "through"}}'
    hosts = [start_fresh("--remote", remote, host=2048, disk=4096) for _ in range(2)]
    with engine(hosts[0], V1, SYNC, reuse=False, seed=1) as first:
        cold = ask(first)
        first.run()
        with Client(hosts[0].address) as client:
            stored = sum(cache.blocks for cache in client.stats().caches)
        await eventually(lambda: sum(each.is_file() for each in tmp_path.rglob("*")), lambda found: found >= stored)
    with engine(hosts[1], V1, SYNC, reuse=False, seed=2) as second, Client(hosts[1].address) as client:
        warm = ask(second)
        second.run()
        await eventually(lambda: client.stats().remote.blocks.get("fetched"), bool)
        assert outputs(warm) == outputs(cold)
        again = ask(second)
        before = second.computed
        second.run()
    assert outputs(again) == outputs(cold)
    assert second.computed - before == sum(each.prompt for each in again) - full_blocks(V1, again)
    await eventually(lambda: held_leases(hosts[1]), lambda leases: leases == 0)


@pytest.mark.parametrize(
    ("stop", "way"), [(DaemonProcess.pause, ASYNC), (DaemonProcess.kill, SYNC)], ids=["stopped", "killed"]
)
async def test_an_engine_goes_on_without_the_daemon(daemon, way, stop):
    """From an offer on, which stands. The engine waits for an answer once, not once a request."""
    _, cold = computed(daemon, V1, way)
    with engine(daemon, V1, {**way, "pin_wait": 0.5}, reuse=False, seed=2) as second:
        offer = second.scheduler.get_num_new_matched_tokens

        def offer_and_stop(request: Request, computed: int) -> tuple[int, bool]:
            offered = offer(request, computed)
            if offered[0] and not daemon.disturbed:
                stop(daemon)
            return offered

        second.scheduler.get_num_new_matched_tokens = offer_and_stop
        warm = ask(second)
        started = time.monotonic()
        second.run()
        assert time.monotonic() - started < len(warm) * 0.5 / 2
        assert daemon.disturbed
        assert outputs(warm) == outputs(cold)
        daemon.resume() if daemon.running else daemon.start()
        await eventually(lambda: held(daemon), lambda slots: slots == 0)
        again = ask(second)
        second.run()
    assert outputs(again) == outputs(cold)
    await eventually(lambda: held_leases(daemon), lambda leases: leases == 0)


@both_ways
@pytest.mark.parametrize("pin", [True, False], ids=["pinned", "not-pinned"])
def test_an_offer_stands_where_it_is_pinned_and_else_the_engine_ends(daemon, way, pin):
    _, cold = computed(daemon, V1, way)
    way = way if pin else {**way, "pin": False}
    with engine(daemon, V1, way, reuse=False, seed=2) as second, Client(daemon.address) as client:
        offer = second.scheduler.get_num_new_matched_tokens

        def offer_and_drop(request: Request, computed: int) -> tuple[int, bool]:
            offered = offer(request, computed)
            (cache,) = client.caches()
            client.open_cache(cache.name, cache.spec).reset(force=True)
            return offered

        second.scheduler.get_num_new_matched_tokens = offer_and_drop
        warm = ask(second)
        if pin:
            second.run()
            assert outputs(warm) == outputs(cold)
            assert second.computed < sum(each.prompt for each in warm)
        else:
            with pytest.raises(RuntimeError, match="could not be loaded"):
                second.run()


ABORTS: Final = [
    *((V1, state) for state in (State.WAITING, State.LOADING, State.SAVING)),
    *((V2, state) for state in (State.CONTEXT, State.LOADING, State.GENERATING)),
]


@pytest.mark.parametrize(("model", "state"), ABORTS, ids=[f"{'v2' if m.index else 'v1'}-{s.name}" for m, s in ABORTS])
async def test_an_abort_leaves_nothing(daemon, model, state):
    elsewhere = {"cache": "other"} if state is State.SAVING else {}  # where all is stored nothing is saved
    _, cold = computed(daemon, model, ASYNC | elsewhere)
    aborted: list[Request] = []
    reached = threading.Event()

    def abort(request: Request) -> None:
        if request.state is state and not aborted:
            request.cancelled = True
            aborted.append(request)
            reached.set()

    with engine(daemon, model, ASYNC, reuse=False, seed=2, chunk=7) as second:
        if state is State.SAVING:  # a save that has not ended
            second.workers[0]._mover._saving.submit(reached.wait)
        second.entered = abort
        asked = ask(second)
        abort(asked[-1])
        second.run()
        assert len(aborted) == 1
        pairs = zip(asked, cold, strict=True)
        assert all(new.output == old.output for new, old in pairs if new not in aborted)
        await eventually(lambda: held(daemon), lambda slots: slots == 0)
    await eventually(lambda: held_leases(daemon), lambda leases: leases == 0)


def test_what_an_adapter_computes_is_left_alone(daemon):
    """Its number may be another adapter's in the next engine."""
    for seed in (1, 2):
        with engine(daemon, V1, SYNC, reuse=False, seed=seed) as executor:
            executor.submit(SHARED, lora=1)
            executor.run()
            assert executor.computed == len(SHARED)


@both_models
async def test_ranks_commit_at_once_or_not_at_all(daemon, model):
    def worker(args: Any) -> Any:
        made = trtllm.KvtierWorker(args)
        if made._rank == 1:
            made.wait_for_save = lambda stream: None  # it never gets there
        return made

    with engine(daemon, model, SYNC, ranks=2, worker=worker, reuse=False) as executor:
        asked = ask(executor)
        executor.run(
            until=lambda: all(len(each.output) == each.most_new or each.state is State.WAITING for each in asked)
        )
        with Client(daemon.address) as client:
            assert [cache.blocks for cache in client.stats().caches] == [0]
    await eventually(lambda: held_leases(daemon), lambda leases: leases == 0)


@pytest.mark.parametrize(
    ("options", "settings", "said"),
    [
        ('{"on_error": "fail", "adress": "/run/kvtier"}', {}, "adress"),
        ('{"on_error": "never"}', {}, "on_error = never: must be one of continue, fail"),
        ('{"on_error": "fail"}', {"max_attention_window": [4096]}, "use_kv_cache_manager_v2"),
        ('{"on_error": "fail"}', {"enable_block_reuse": False}, "enable_block_reuse = False: must be true"),
        ('{"on_error": "fail"}', {"host_cache_size": 1 << 30}, "host_cache_size = 1073741824: must be 0"),
        ('{"on_error": "fail"}', {"disk_cache_size": 1 << 30}, "disk_cache_size"),
        ('{"on_error": "fail"}', {"pipeline_parallel_size": 2}, "pipeline_parallel_size = 2: must be 1"),
        ('{"on_error": "fail"}', {"context_parallel_size": 2}, "context_parallel_size = 2: must be 1"),
        ('{"on_error": "fail"}', {"max_beam_width": 4}, "max_beam_width = 4: must be 1"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(monkeypatch, options, settings, said):
    monkeypatch.setenv(trtllm.OPTIONS, options)
    with standing_in(Ranks(1)), pytest.raises(InvalidArgument, match=said) as refused:
        worker = trtllm.KvtierWorker(SimpleNamespace(**vars(llm_args(V1, **settings)), **settings))
        worker.register_kv_caches(None)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("grouped", [False, True], ids=["v1", "v2"])
def test_only_v1_needs_a_scheduler_that_evicts_nothing(monkeypatch, grouped):
    monkeypatch.setenv(trtllm.OPTIONS, '{"on_error": "fail"}')
    monkeypatch.setattr(trtllm._Scheduler, "here", None)
    with standing_in(Ranks(1)):
        worker = trtllm.KvtierWorker(args := llm_args(V1))
        args.scheduler_config = SimpleNamespace(capacity_scheduler_policy="MAX_UTILIZATION")
        if grouped:
            pool = GroupedPool(V1, 0, 4)
            worker.register_kv_cache_layout(pool.layout)
            worker.close()
        else:
            with pytest.raises(InvalidArgument, match="MAX_UTILIZATION: must be GUARANTEED_NO_EVICT"):
                worker.register_kv_caches(None)


def test_an_engine_without_the_interfaces_is_named_in_one_line(monkeypatch):
    for name in ("KvtierScheduler", "KvtierWorker"):
        monkeypatch.delitem(vars(trtllm), name, raising=False)
    with pytest.raises(ImportError, match=r"TensorRT-LLM 1\.4: No module named 'tensorrt_llm'"):
        trtllm.KvtierWorker  # noqa: B018
    with standing_in(Ranks(1)):
        monkeypatch.delattr(sys.modules[CONNECTORS], "KvCacheConnectorWorker")
        with pytest.raises(ImportError, match="has no attribute 'KvCacheConnectorWorker'"):
            trtllm.KvtierWorker  # noqa: B018


@pytest.mark.parametrize(
    ("settings", "cache", "said"),
    [
        ({}, {"max_attention_window": [4096]}, "max_attention_window = [4096]: must be left out"),
        ({"adress": "x"}, {}, "kvtier setting adress = x: must be left out"),
        ({"max_tokens": 0}, {}, "max_tokens = 0: must be a number of tokens"),
        ({"max_tokens": 15}, {}, "max_tokens = 15: must be at least 16"),
        ({"host_bytes": 16383}, {}, "host_bytes = 16383: must be at least 16384: 2 blocks of each group of layers"),
    ],
)
def test_an_engine_runs_without_kvtier_where_it_cannot_be_used(daemon, caplog, settings, cache, said):
    with engine(daemon, V1, SYNC | settings, ranks=2, cache=cache) as executor:
        ask(executor)
        executor.run()
    (line,) = [each for each in caplog.messages if "runs without kvtier" in each]
    assert said in line
    with Client(daemon.address) as client:
        assert client.caches() == []
