"""Replays the requests of ``benchmarks.replay`` through one engine, in a process with the engine's interpreter.

Reads a :class:`Job` and the requests, and writes a :class:`Record`, all as JSON.
"""

from __future__ import annotations

import asyncio
import ctypes
import hashlib
import json
import mmap
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

Rows: TypeAlias = NDArray[np.uint8]
"""Blocks: ``[block, byte]``."""
Prompt: TypeAlias = Sequence[int]
"""The numbers of a prompt's blocks."""

PAGE: Final = 4096
LIMIT_S: Final = 900
"""The most seconds of one replay."""
_START_S: Final = 60.0
_INSIST_S: Final = 15.0
"""How long a store that is refused for want of room is repeated."""
_WARM_SHARE: Final = 0.94
_TOKENS: Final = 16
"""Tokens of a block, for LMCache."""


@dataclass(slots=True, frozen=True)
class Job:
    """A replay. ``memory`` and ``disk``: in blocks; ``disk`` = 0: memory alone. ``longest``: blocks of a prompt.
    ``distinct``: blocks of the trace. ``home``: an empty directory on the disk. ``pace``: requests that begin in a
    second; 0 = a request begins when the one before ends."""

    engine: str
    block_bytes: int
    memory: int
    disk: int
    longest: int
    distinct: int
    home: str
    pace: float = 0.0

    @property
    def memory_bytes(self) -> int:
        return self.memory * self.block_bytes


@dataclass(slots=True)
class Record:
    """``requests`` and ``stores``: the seconds of each, in the three verbs; ``asked``, ``loaded`` and ``wrong`` in
    blocks; ``faults``: the servers' page faults."""

    faults: int = 0
    asked: int = 0
    loaded: int = 0
    wrong: int = 0
    requests: list[float] = field(default_factory=list)
    stores: list[float] = field(default_factory=list)


@dataclass(slots=True, frozen=True)
class Engine:
    """An engine behind its adapter.

    ``rows``: where blocks are computed, a row a block of the prompt. ``servers``: ids of the processes that keep them.
    ``lookup``: counts the stored blocks of a prompt, from its first. ``load``: copies that many into the first rows
    and returns how many came. ``store``: stores the blocks from a place on. ``empty``: forgets all blocks. ``finish``:
    runs after each request, outside of the clock.
    """

    rows: Rows
    servers: Sequence[int]
    lookup: Callable[[Prompt], int]
    load: Callable[[Prompt, int], int]
    store: Callable[[Prompt, int], object]
    empty: Callable[[], object]
    finish: Callable[[], object] = lambda: None


# -- the engines -------------------------------------------------------------------------------------------------------


@contextmanager
def kvtier(job: Job) -> Iterator[Engine]:
    from kvtier import Tier, sync
    from kvtier.replay.private import PrivateDaemon
    from kvtier.replay.trace import replay_spec

    room = mmap.mmap(-1, job.longest * job.block_bytes)  # page-aligned, as the peers' rows are
    rows: Rows = np.frombuffer(room, np.uint8).reshape(job.longest, job.block_bytes)
    keys = [hashlib.sha256(str(block).encode()).digest() for block in range(job.distinct + job.memory)]

    def packed(prompt: Prompt) -> bytes:
        return b"".join([keys[block] for block in prompt])

    def store(prompt: Prompt, first: int) -> None:
        parent = keys[prompt[first - 1]] if first else None
        cache.put(packed(prompt[first:]), rows[first : len(prompt)], parent=parent)

    # A slot of the disk also has a header.
    sizes = {Tier.HOST: job.memory_bytes, Tier.DISK: job.disk * (job.block_bytes + PAGE)}
    daemon = PrivateDaemon(sizes)
    with asyncio.Runner() as runner:
        runner.run(daemon.__aenter__())
        try:
            with sync.Client(daemon.address, timeout=_START_S) as client:
                cache = client.open_cache("replay", replay_spec(job.block_bytes))
                yield Engine(
                    rows,
                    [daemon.pid],
                    lambda prompt: cache.prefix_length(packed(prompt)),
                    lambda prompt, found: len(cache.get(packed(prompt[:found]), rows[:found])),
                    store,
                    lambda: cache.reset(force=True),
                )
        finally:
            with suppress(TimeoutError):  # the daemon is killed then; the system frees much memory slowly
                runner.run(daemon.__aexit__(None, None, None))


@contextmanager
def mooncake(job: Job, *, insists: bool = False, embedded: bool = False) -> Iterator[Engine]:
    """A process owns all memory and shares the rows with a client without storage; ``embedded``: the engine's process
    owns the memory. ``insists``: a store that is refused for want of room is repeated."""
    import mooncake as package
    from mooncake.store import MooncakeDistributedStore

    rpc, metrics, port = (_free_port() for _ in range(3))
    master_at, programs = f"127.0.0.1:{rpc}", Path(package.__file__).parent
    disk, offload = job.disk * job.block_bytes, ["-enable_offload=true"] * bool(job.disk)
    master = [programs / "mooncake_master", f"-rpc_port={rpc}", "-rpc_address=127.0.0.1", *offload]
    master += [f"-metrics_port={metrics}", "-metrics_host=127.0.0.1"]
    master.append("-default_kv_lease_ttl=500")  # ms; for its default of 10 s no block that was looked up is evicted
    owner = [programs / "mooncake_client", f"-port={port}", "-host=127.0.0.1", "-threads=2", *offload]
    owner += [f"-master_server_address={master_at}", "-metadata_server=P2PHANDSHAKE"]
    owner.append(f"-global_segment_size={job.memory_bytes}")
    settings = {
        "FILE_STORAGE_PATH": job.home,
        "TOTAL_SIZE_LIMIT_BYTES": disk,
        "BUCKET_MAX_TOTAL_SIZE": disk,
        "BUCKET_SIZE_LIMIT_BYTES": job.memory_bytes // 8,
        "LOCAL_BUFFER_SIZE_BYTES": 1 << 30,
        "HEARTBEAT_INTERVAL_SECONDS": 1,
    }
    variables = {f"MOONCAKE_OFFLOAD_{name}": str(value) for name, value in settings.items() if disk}
    with ExitStack() as servers:
        pids = [servers.enter_context(_server(master, {}, rpc))]
        nbytes, library = job.longest * job.block_bytes, MooncakeDistributedStore()
        if embedded:
            os.environ.update(variables)
            wanted = (f"127.0.0.1:{port}", "P2PHANDSHAKE", job.memory_bytes, 16 << 20, "tcp", "", master_at, None)
            assert library.setup(*wanted, bool(disk), job.home if disk else "") == 0
            room = mmap.mmap(-1, nbytes)
            start = ctypes.addressof(ctypes.c_uint8.from_buffer(room))
            pids.append(os.getpid())
        else:
            pids.append(servers.enter_context(_server(owner, variables, port)))
            give_up = time.monotonic() + _INSIST_S  # its port is open before it answers there
            while library.setup_dummy(nbytes + (64 << 20), 16 << 20, f"127.0.0.1:{port}"):
                assert time.monotonic() < give_up
                time.sleep(0.1)
            start = library.alloc_from_mem_pool(nbytes)
        assert start and library.register_buffer(start, nbytes) == 0
        rows = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(start)).reshape(job.longest, -1)
        rows[:] = 0
        places = [start + row * job.block_bytes for row in range(job.longest)]
        sizes = [job.block_bytes] * job.longest

        def names(prompt: Prompt) -> list[str]:
            return [f"block-{block}" for block in prompt]

        def load(prompt: Prompt, found: int) -> int:
            codes = library.batch_get_into(names(prompt[:found]), places[:found], sizes[:found])
            return _leading(code == job.block_bytes for code in codes)

        def store(prompt: Prompt, first: int) -> None:
            give_up = time.monotonic() + _INSIST_S
            while time.monotonic() < give_up:
                part = slice(first, len(prompt))
                codes = library.batch_put_from(names(prompt[part]), places[part], sizes[part])
                first += _leading(code == 0 for code in codes)
                if first == len(prompt) or not insists:
                    return
                time.sleep(0.002)

        def lookup(prompt: Prompt) -> int:
            return _leading(code == 1 for code in library.batch_is_exist(names(prompt)))

        yield Engine(rows, pids, lookup, load, store, lambda: library.remove_all(True))


@contextmanager
def lmcache(job: Job) -> Iterator[Engine]:
    """A block is a chunk in one tensor, which the engine's process copies. Block 0 is LMCache's null block."""
    from lmcache.cli.commands.bench.server_bench import client, config, helpers

    port, http, mode = _free_port(), _free_port(), "engine_driven"
    command = [sys.executable, "-m", "lmcache.cli.main", "server", "--host", "127.0.0.1", "--port", port]
    command += ["--http-host", "127.0.0.1", "--http-port", http, "--chunk-size", _TOKENS, "--disable-observability"]
    command += ["--l1-size-gb", job.memory_bytes / (1 << 30), "--eviction-policy", "LRU"]
    command += ["--supported-transfer-mode", mode, "--shm-name", f"lmcache_{port}"]
    if job.disk:
        gigabytes = job.disk * job.block_bytes / (1 << 30)
        disk = {"type": "fs_native", "base_path": job.home, "max_capacity_gb": gigabytes}
        command += ["--l2-adapter", json.dumps(disk | {"eviction": {"eviction_policy": "LRU"}})]
    variables = {"LMCACHE_TRACK_USAGE": "false", "LMCACHE_LOG_LEVEL": "WARNING"}
    with _no_shared_memory_left("lmcache"), _server(command, variables, http) as server:
        blocks = 1 + job.longest
        shape = f"(1,{blocks},{_TOKENS},1,{job.block_bytes // _TOKENS}):uint8:1"
        wanted = config.BenchConfig(f"tcp://127.0.0.1:{port}", "", "cpu", mode, 1, False, 0, shape, blocks, _TOKENS)
        library = client.ServerBenchClient(wanted, lambda line: None)
        library.start()
        calls, (worker,) = library._req_client, library._workers
        rows = worker.kv_caches["layer.0"].numpy().reshape(blocks, job.block_bytes)[1:]
        requests: list[Any] = []

        def lookup(prompt: Prompt) -> int:
            name, tokens = f"request-{time.monotonic_ns()}", tuple(block for block in prompt for _ in range(_TOKENS))
            request = client.RequestContext(
                0, name, "", tokens, len(tokens), len(prompt), _TOKENS, block_offset=1, num_blocks=len(prompt)
            )
            requests.append(request)
            assert helpers._send_lookup(calls, helpers._make_key(tokens, name, start=0, end=len(tokens)))
            return int(calls.wait_prefetch_status(name, _START_S).result(timeout=_START_S))

        def load(prompt: Prompt, found: int) -> int:
            return found if library.retrieve(requests[0], 0, found * _TOKENS).succeeded else 0

        def store(prompt: Prompt, first: int) -> None:
            library.store(requests[0], first * _TOKENS, (len(prompt) - first) * _TOKENS)

        def empty() -> None:
            order = urllib.request.Request(f"http://127.0.0.1:{http}/cache/clear", b'{"force": true}')
            order.add_header("Content-Type", "application/json")
            urllib.request.urlopen(order, timeout=_START_S).close()

        yield Engine(rows, [server], lookup, load, store, empty, lambda: library.end_session(requests.pop()))


@contextmanager
def _no_shared_memory_left(name: str) -> Iterator[None]:
    """Removes the segments that an engine's processes made and did not remove."""
    folder = Path("/dev/shm")
    before = set(folder.glob(f"*{name}*"))
    try:
        yield
    finally:
        for left in set(folder.glob(f"*{name}*")) - before:
            left.unlink(missing_ok=True)


ENGINES: Final[Mapping[str, Callable[[Job], AbstractContextManager[Engine]]]] = {
    "kvtier": kvtier,
    "mooncake": mooncake,
    "mooncake-insisting": partial(mooncake, insists=True),
    "mooncake-embedded": partial(mooncake, embedded=True),
    "lmcache": lmcache,
}


# -- the replay --------------------------------------------------------------------------------------------------------


def replay(engine: Engine, job: Job, prompts: Sequence[Prompt]) -> Record:
    """Times the three verbs alone. Before a load, rows are spoilt in every page; after it every byte is compared.

    A block is a window of one random pattern, at a place of its own: no two have the same word at the same place.
    """
    record, rows = Record(), engine.rows
    pattern = np.random.default_rng(0).integers(0, 256, job.distinct * PAGE + job.block_bytes, np.uint8)

    def payload(block: int) -> Rows:
        return pattern[block * PAGE :][: job.block_bytes]

    def timed(verb: Callable[..., Any], *wanted: object) -> tuple[Any, float]:
        began = time.perf_counter()
        answer, seconds = verb(*wanted), time.perf_counter() - began
        record.requests[-1] += seconds
        return answer, seconds

    def faults() -> int:
        return sum(int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[7]) for pid in engine.servers)

    faults_before, began = faults(), time.perf_counter()
    for number, prompt in enumerate(prompts):
        if job.pace:
            time.sleep(max(0.0, began + number / job.pace - time.perf_counter()))
        record.requests.append(0.0)
        loaded, (found, _) = 0, timed(engine.lookup, prompt)
        if found:
            rows[:found, ::PAGE] ^= 0xFF
            loaded, _ = timed(engine.load, prompt, found)
        record.wrong += sum(not np.array_equal(payload(prompt[at]), rows[at]) for at in range(loaded))
        for at in range(loaded, len(prompt)):
            rows[at] = payload(prompt[at])
        if loaded < len(prompt):
            record.stores.append(timed(engine.store, prompt, loaded)[1])
        engine.finish()
        record.asked += len(prompt)
        record.loaded += loaded
    record.faults = faults() - faults_before
    return record


def warm(engine: Engine, job: Job) -> None:
    """Stores blocks of other names and forgets them: no page of the pool is touched for the first time in the clock."""
    numbers = range(job.distinct, job.distinct + int(_WARM_SHARE * job.memory))
    for start in range(0, len(numbers), job.longest):
        prompt = numbers[start : start + job.longest]
        engine.lookup(prompt)
        engine.store(prompt, 0)
        engine.finish()
    engine.empty()


def _leading(good: Iterable[bool]) -> int:
    return sum(1 for _ in takewhile(bool, good))


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


@contextmanager
def _server(command: Sequence[Any], variables: Mapping[str, str], port: int) -> Iterator[int]:
    """Yields the server's process id, once it listens."""
    words = list(map(str, command))
    with subprocess.Popen(words, env=os.environ | variables, stdout=sys.stderr, stderr=sys.stderr) as server:
        try:
            give_up = time.monotonic() + _START_S
            while True:
                with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                    break
                assert server.poll() is None and time.monotonic() < give_up, f"{words[0]} did not start"
                time.sleep(0.05)
            yield server.pid
        finally:
            server.kill()


def main() -> None:
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries chat on standard output
    signal.signal(signal.SIGALRM, signal.default_int_handler)  # the servers end with the blocks that hold them
    signal.alarm(LIMIT_S)
    wanted, prompts = json.load(sys.stdin)
    job = Job(**wanted)
    with ENGINES[job.engine](job) as engine:
        warm(engine, job)
        print(json.dumps(asdict(replay(engine, job, prompts))), file=output, flush=True)
    os._exit(0)  # without the farewells of libraries whose servers are gone


if __name__ == "__main__":
    main()
