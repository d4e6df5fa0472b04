"""``kvtier bridge``: a router that follows vLLM's events knows, over everything, where a daemon has which block."""

import asyncio
import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import dataclass, field

import msgspec
import pytest
import zmq

from kvtier import CacheOptions, Tier, event_hashes
from kvtier.bridge import Options
from kvtier.bridge.publisher import END
from kvtier.bridge.vllm import MEDIA
from kvtier.types import tiers_of
from tests.integration.blocks import SPEC, blocks, chain, opened_cache, put_chain, sizes
from tests.integration.conftest import own_daemon
from tests.integration.waiting import PATIENCE_S, eventually
from tests.vllm_reader import Router

NAME = "llama"
STEP = SPEC.tokens_per_block
PATIENCE_MS = int(PATIENCE_S * 1000)
daemon = own_daemon(device=16, host=32, disk=64)


@dataclass
class Follower:
    """A router's end of the sockets: batches in order, and what is missing asked for, as llm-d's and Dynamo's do."""

    endpoint: str
    replay: str
    router: Router = field(default_factory=Router)
    last: int = -1

    def __post_init__(self):
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.context.linger = 0
        self.sub = self.context.socket(zmq.SUB)
        self.sub.setsockopt(zmq.SUBSCRIBE, b"")
        self.sub.connect(self.endpoint)

    def close(self):
        self.context.destroy(linger=0)

    def catch_up(self):
        """Takes all that is there. Asks for the beginning first."""
        if self.last < 0:
            self._ask()
        while self.sub.poll(0):
            _, seq, payload = self.sub.recv_multipart()
            number = int.from_bytes(seq, "big")
            if number > self.last + 1:
                self._ask()
            elif number == self.last + 1:
                self._take(number, payload)

    def _ask(self):
        with self.context.socket(zmq.DEALER) as dealer:
            dealer.connect(self.replay)
            dealer.send_multipart([b"", (self.last + 1).to_bytes(8, "big")])
            while True:
                assert dealer.poll(PATIENCE_MS), "no answer"
                _, _, seq, payload = dealer.recv_multipart()
                if seq == END:
                    return
                self._take(int.from_bytes(seq, "big"), payload)

    def _take(self, number, payload):
        assert number > self.last
        self.router.apply(payload)
        self.last = number


@dataclass
class BridgeProcess:
    process: subprocess.Popen[str]
    endpoint: str
    replay: str

    def follower(self):
        return Follower(self.endpoint, self.replay)


def command(daemon, *options):
    return [sys.executable, "-m", "kvtier.cli", "bridge", "--address", daemon.address, "--cache", NAME, *options]


@contextmanager
def bridge(daemon, *options):
    """A bridge on free ports; it ends cleanly, with nothing on standard error but gaps, and that it has no tokens."""
    places = ("--endpoint", "tcp://127.0.0.1:*", "--replay-endpoint", "tcp://127.0.0.1:*")
    process = subprocess.Popen(
        command(daemon, *places, *options), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None and process.stderr is not None
        line = process.stdout.readline()
        assert line.startswith("kvtier bridge ready "), f"{line!r}\n{process.stderr.read()}"
        said = dict(word.split("=") for word in line.split()[3:])
        yield BridgeProcess(process, said["endpoint"], said["replay"])
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0, errors
        blind = "--tokens" not in options
        expected = ("gap ", "warning: cache llama: no token ids without --tokens") if blind else ("gap ",)
        assert all(each.startswith(expected) for each in errors.splitlines()), errors
    finally:
        process.kill()
        process.communicate()


def ended(command):
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)


def begun(command):
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


async def listed(cache):
    rows = [row async for row in cache.blocks()]
    return {(0, int.from_bytes(row.key[:8], "big")): {MEDIA[tier] for tier in tiers_of(row.residency)} for row in rows}


async def assert_knows(follower, cache):
    async def differences():
        await asyncio.to_thread(follower.catch_up)
        told, there = follower.router.listing, await listed(cache)
        return [where for where in told.keys() | there.keys() if told.get(where) != there.get(where)]

    await eventually(differences, lambda found: not found)


@pytest.fixture
async def cache(client):
    return await client.open_cache(NAME, SPEC)


async def some_life(cache, name):
    """Blocks stored, moved both ways, evicted for lack of room and dropped."""
    for number in range(6):
        await put_chain(cache, f"{name}/{number}", 6)
    await cache.move(chain(f"{name}/5", 6), Tier.DISK)
    await cache.get(chain(f"{name}/0", 6))
    await cache.drop(chain(f"{name}/1", 1))


async def test_the_daemon_is_killed_and_the_router_ends_up_right(daemon, client, cache):
    """Also one that comes only then."""
    with bridge(daemon) as process:
        follower = process.follower()
        await some_life(cache, "before")
        await assert_knows(follower, cache)
        for number in range(2):
            await asyncio.to_thread(daemon.crash)
            cache = await client.open_cache(NAME, SPEC)
            await some_life(cache, f"after {number}")
            await assert_knows(follower, cache)
        late = process.follower()
        await assert_knows(late, cache)
        for each in (follower, late):
            each.close()


async def test_a_bridge_that_was_stopped_for_a_while_makes_its_gap_good(start_daemon):
    """The daemon holds few events, and logs none: what the bridge slept through is gone."""
    daemon = start_daemon("--event-ring-bytes", "16KiB", "--event-log-bytes", "0", device=16, host=32, disk=64)
    async with opened_cache(daemon.address, NAME) as (_, cache):
        with bridge(daemon) as process:
            follower = process.follower()
            await some_life(cache, "before")
            await assert_knows(follower, cache)
            os.kill(process.process.pid, signal.SIGSTOP)
            try:
                for number in range(20):
                    await some_life(cache, f"unseen {number}")
            finally:
                os.kill(process.process.pid, signal.SIGCONT)
            await assert_knows(follower, cache)
            follower.close()


async def test_a_bridge_that_is_followed_by_another_leaves_no_reader_behind(daemon, cache, short_dir):
    places = ("--endpoint", f"ipc://{short_dir}/events", "--replay-endpoint", f"ipc://{short_dir}/replay")
    with bridge(daemon, *places) as process:
        follower = process.follower()
        await some_life(cache, "before")
        await assert_knows(follower, cache)
    await some_life(cache, "between")
    with bridge(daemon, *places):
        await some_life(cache, "after")
        await assert_knows(follower, cache)
        follower.close()


async def test_tokens_and_hashes_as_routers_want_them(daemon, client):
    ids = list(range(1000, 1000 + 3 * STEP))
    packed = event_hashes("v1_block_key", ids, STEP)
    hashes = [int.from_bytes(packed[start : start + 8], "big") for start in range(0, len(packed), 8)]
    options = CacheOptions(event_hash="v1_block_key", keep_tokens=True)
    cache = await client.open_cache(NAME, SPEC, options=options)
    prompt = cache.prompt(ids)
    await cache.put(prompt.keys, blocks([prompt.keys[:32]] * 3), prompt=prompt)
    await cache.move(prompt.keys, Tier.HOST)
    with bridge(daemon, "--tokens") as process, bridge(daemon) as other:
        seeing, blind = process.follower(), other.follower()
        expected = {(0, number): {"CPU"} for number in hashes}
        for follower, tokens in ((seeing, ids), (blind, [])):

            async def told(follower=follower):
                await asyncio.to_thread(follower.catch_up)
                return follower.router.listing

            assert await eventually(told, lambda listing: listing == expected)
            said = [token for number in hashes for token in follower.router.tokens.get((0, number), [])]
            assert said == tokens
            follower.close()


async def test_one_bridge_serves_the_ranks_of_a_model(daemon, client):
    """Each has a place, a topic and a rank of its own, as vLLM's have."""
    names = ["rank-0", "rank-1"]
    caches = [await client.open_cache(name, SPEC, budgets=sizes(host=8)) for name in names]
    for number, cache in enumerate(caches):
        await cache.put(chain(f"rank {number}", 3), blocks(chain(f"rank {number}", 3)))
    which = [word for name in names for word in ("--cache", name)]
    places = ("--endpoint", "tcp://127.0.0.1:*", "--replay-endpoint", "tcp://127.0.0.1:*", "--topic", "kv@pod@{cache}")
    start = [sys.executable, "-m", "kvtier.cli", "bridge", "--address", daemon.address, *which, *places]
    with begun(start) as process:
        assert process.stdout is not None
        try:
            said = [dict(word.split("=") for word in process.stdout.readline().split()[3:]) for _ in names]
            for number, each in enumerate(sorted(said, key=lambda each: each["cache"])):
                assert each["endpoint"].startswith("tcp://127.0.0.1:")
                follower = Follower(each["endpoint"], each["replay"])
                await assert_knows(follower, caches[number])
                assert len(follower.router.listing) == 3
                with follower.context.socket(zmq.DEALER) as dealer:
                    dealer.connect(each["replay"])
                    dealer.send_multipart([b"", bytes(8)])
                    assert dealer.poll(PATIENCE_MS)
                    _, topic, _, payload = dealer.recv_multipart()
                assert (topic, msgspec.msgpack.decode(payload)[2]) == (f"kv@pod@{names[number]}".encode(), number)
                follower.close()
        finally:
            process.send_signal(signal.SIGTERM)


def test_further_caches_have_the_next_ports():
    options = Options("tcp://127.0.0.1:5557", "ipc:///run/kvtier/replay", topic="kv@pod@{cache}", data_parallel_rank=2)
    second = options.of_rank(3, "llama")
    assert (second.endpoint, second.replay_endpoint) == ("tcp://127.0.0.1:5560", "ipc:///run/kvtier/replay_dp3")
    assert (second.topic, second.data_parallel_rank) == ("kv@pod@llama", 5)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--cache", "tpyo"], "warning: there is no cache tpyo yet (there are: llama"),
        (["--cache", NAME, "--tokens"], "warning: cache llama keeps no token ids"),
        (["--cache", NAME, "--group", "7"], "warning: there is no window group 7 in llama"),
    ],
)
async def test_a_bridge_that_can_say_nothing_says_so(daemon, client, options, says):
    await client.open_cache(NAME, SPEC, budgets=sizes(host=4))
    start = [sys.executable, "-m", "kvtier.cli", "bridge", "--address", daemon.address, *options]
    start += ["--endpoint", "tcp://127.0.0.1:*"]
    with begun(start) as process:
        assert process.stderr is not None
        try:
            assert process.stderr.readline().startswith(says)
        finally:
            process.kill()


def test_without_the_extra_it_says_what_to_install():
    code = "import sys; sys.modules['zmq'] = None; from kvtier.cli import main; main()"
    done = ended([sys.executable, "-c", code, "bridge", "--cache", NAME])
    assert (done.returncode, done.stderr) == (
        1,
        "Error: zmq is missing: pip install '.[zmq]' in a clone of kvtier\n",
    )


def test_who_may_not_watch_is_refused(start_daemon, tmp_path):
    """And the bridge ends, rather than to publish nothing for ever."""
    rules = '[[allow]]\nanonymous = true\ncaches = ["*"]\nverbs = ["read"]\n'
    (tmp_path / "kvtierd.toml").write_text(rules)
    flags = ("--config", str(tmp_path / "kvtierd.toml"), "--listen-tcp", "127.0.0.1:0", "--tcp-insecure")
    daemon = start_daemon(*flags, host=4)
    insecure = ("--address", f"tcp://{daemon.tcp_address}", "--insecure", "--endpoint", "tcp://127.0.0.1:*")
    done = ended([*command(daemon), *insecure])
    assert done.returncode == 1
    assert "the right to watch" in done.stderr
