"""One engine of ``benchmarks.replay`` in a process of its own, with the engine's interpreter: it replays the requests.

It reads a :class:`Job` as a line of JSON and the requests as another, and writes a :class:`Record`.
"""

from __future__ import annotations

import asyncio
import ctypes
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

Rows: TypeAlias = NDArray[np.uint8]
"""Blocks one after the other: ``[block, byte]``."""
Prompt: TypeAlias = Sequence[int]
"""The numbers of its blocks."""

PAGE: Final = 4096
LIMIT_S: Final = 900
"""For one replay."""
_START_S: Final = 60.0
_INSIST_S: Final = 15.0
"""How long a store is repeated that is refused for want of room."""
_TOKENS: Final = 16
"""Of a block, for LMCache."""


@dataclass(slots=True, frozen=True)
class Job:
    """What to replay, with how many blocks of memory and of disk; ``disk`` = 0: without. ``home``: an empty directory
    on the disk. ``cold``: as soon as the servers answer, else once their memory no longer grows."""

    engine: str
    block_bytes: int
    memory: int
    disk: int
    longest: int
    distinct: int
    home: str
    cold: bool


@dataclass(slots=True)
class Record:
    """``seconds`` of the three verbs; ``stores``: seconds and blocks of each; ``written``: the clock and the servers'
    bytes to disk after each request."""

    seconds: float = 0.0
    asked: int = 0
    loaded: int = 0
    wrong: int = 0
    stores: list[tuple[float, int]] = field(default_factory=list)
    written: list[tuple[float, int]] = field(default_factory=list)


@dataclass(slots=True, frozen=True)
class Engine:
    """What an adapter makes of an engine.

    ``rows``: where blocks are computed, a row a block of the prompt. ``servers``: ids of the processes that keep them.
    ``lookup``: how many blocks of a prompt, from its first, are there. ``load``: copies so many into the first rows
    and returns how many came. ``store``: stores the blocks from a place on.
    """

    rows: Rows
    servers: Sequence[int]
    lookup: Callable[[Prompt], int]
    load: Callable[[Prompt, int], int]
    store: Callable[[Prompt, int], object]


# -- the engines -------------------------------------------------------------------------------------------------------


@contextmanager
def kvtier(job: Job) -> Iterator[Engine]:
    from kvtier import Tier, sync
    from kvtier.replay.private import PrivateDaemon
    from kvtier.replay.trace import replay_spec

    rows = np.zeros((job.longest, job.block_bytes), np.uint8)
    keys = [hashlib.sha256(str(block).encode()).digest() for block in range(job.distinct)]

    def packed(prompt: Prompt) -> bytes:
        return b"".join([keys[block] for block in prompt])

    def store(prompt: Prompt, first: int) -> None:
        parent = keys[prompt[first - 1]] if first else None
        cache.put(packed(prompt[first:]), rows[first : len(prompt)], parent=parent)

    # A slot of the disk also has a header.
    sizes = {Tier.HOST: job.memory * job.block_bytes, Tier.DISK: job.disk * (job.block_bytes + PAGE)}
    daemon = PrivateDaemon(sizes, keep=Path(job.home))
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
                )
        finally:
            with suppress(TimeoutError):  # it is killed then; the system needs long to free much memory
                runner.run(daemon.__aexit__(None, None, None))


@contextmanager
def mooncake(job: Job) -> Iterator[Engine]:
    """A process owns all memory; a client without storage shares the rows with it."""
    import mooncake as package
    from mooncake.store import MooncakeDistributedStore

    rpc, metrics, port = (_free_port() for _ in range(3))
    disk = job.disk * job.block_bytes
    offload = ["-enable_offload=true"] if disk else []
    programs = Path(package.__file__).parent
    master = [programs / "mooncake_master", f"-rpc_port={rpc}", "-rpc_address=127.0.0.1", *offload]
    master += [f"-metrics_port={metrics}", "-metrics_host=127.0.0.1"]
    master.append("-default_kv_lease_ttl=500")  # ms; for its default of 10 s nothing looked up can be evicted
    owner = [programs / "mooncake_client", f"-port={port}", "-host=127.0.0.1", *offload]
    owner += [f"-master_server_address=127.0.0.1:{rpc}", "-metadata_server=P2PHANDSHAKE"]
    owner.append(f"-global_segment_size={job.memory * job.block_bytes}")
    variables = {
        "MOONCAKE_OFFLOAD_FILE_STORAGE_PATH": job.home,
        "MOONCAKE_OFFLOAD_TOTAL_SIZE_LIMIT_BYTES": disk,
        "MOONCAKE_OFFLOAD_BUCKET_MAX_TOTAL_SIZE": disk,
        "MOONCAKE_OFFLOAD_BUCKET_SIZE_LIMIT_BYTES": job.memory * job.block_bytes // 8,
        "MOONCAKE_OFFLOAD_LOCAL_BUFFER_SIZE_BYTES": 1 << 30,
        "MOONCAKE_OFFLOAD_HEARTBEAT_INTERVAL_SECONDS": 1,
    }
    with _server(master, {}, rpc) as first_pid, _server(owner, variables if disk else {}, port) as second_pid:
        nbytes, library = job.longest * job.block_bytes, MooncakeDistributedStore()
        give_up = time.monotonic() + _INSIST_S  # its port is open before it answers there
        while library.setup_dummy(nbytes + (64 << 20), 16 << 20, f"127.0.0.1:{port}"):
            assert time.monotonic() < give_up
            time.sleep(0.1)
        start = library.alloc_from_mem_pool(nbytes)
        assert start and library.register_buffer(start, nbytes) == 0
        memory = memoryview((ctypes.c_uint8 * nbytes).from_address(start))
        rows: Rows = np.frombuffer(memory, np.uint8).reshape(job.longest, job.block_bytes)
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
                if first == len(prompt):
                    return
                time.sleep(0.002)

        def lookup(prompt: Prompt) -> int:
            return _leading(code == 1 for code in library.batch_is_exist(names(prompt)))

        yield Engine(rows, (first_pid, second_pid), lookup, load, store)


@contextmanager
def lmcache(job: Job) -> Iterator[Engine]:
    """A block is a chunk, in one tensor that the server copies out of and into. Block 0 is its null block."""
    from lmcache.cli.commands.bench.server_bench import client, config, helpers

    port, http = _free_port(), _free_port()
    command = [sys.executable, "-m", "lmcache.cli.main", "server", "--host", "127.0.0.1", "--port", port]
    command += ["--http-host", "127.0.0.1", "--http-port", http, "--chunk-size", _TOKENS, "--disable-observability"]
    command += ["--l1-size-gb", job.memory * job.block_bytes / (1 << 30), "--eviction-policy", "LRU"]
    if job.disk:
        gigabytes = job.disk * job.block_bytes / (1 << 30)
        disk = {"type": "fs_native", "base_path": job.home, "max_capacity_gb": gigabytes}
        command += ["--l2-adapter", json.dumps(disk | {"eviction": {"eviction_policy": "LRU"}})]
    with _server(command, {"LMCACHE_TRACK_USAGE": "false", "LMCACHE_LOG_LEVEL": "WARNING"}, http) as server:
        blocks = 1 + job.longest
        shape = f"(1,{blocks},{_TOKENS},1,{job.block_bytes // _TOKENS}):uint8:1"
        url = f"tcp://127.0.0.1:{port}"
        library = client.ServerBenchClient(
            config.BenchConfig(url, "", "cpu", "lmcache_driven", 1, False, 0, shape, blocks, _TOKENS), lambda line: None
        )
        library.start()
        calls, (worker,) = library._req_client, library._workers
        rows = worker.kv_caches["layer.0"].numpy().reshape(blocks, job.block_bytes)[1:]
        requests: list[Any] = []

        def lookup(prompt: Prompt) -> int:
            if requests:
                library.end_session(requests.pop())
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

        yield Engine(rows, [server], lookup, load, store)


ENGINES: Final[Mapping[str, Callable[[Job], AbstractContextManager[Engine]]]] = {
    "kvtier": kvtier,
    "mooncake": mooncake,
    "lmcache": lmcache,
}


# -- the replay --------------------------------------------------------------------------------------------------------


def replay(engine: Engine, job: Job, prompts: Sequence[Prompt]) -> Record:
    """Only the three verbs are timed. Before a load, rows are spoilt in every page; after it every byte is compared.

    A block is a window of one random pattern, at a place of its own: no two have the same word at the same place.
    """
    record, rows = Record(), engine.rows
    pattern = np.random.default_rng(0).integers(0, 256, job.distinct * PAGE + job.block_bytes, np.uint8)

    def payload(block: int) -> Rows:
        return pattern[block * PAGE :][: job.block_bytes]

    def timed(verb: Callable[..., Any], *wanted: object) -> Any:
        began = time.perf_counter()
        answer = verb(*wanted)
        record.seconds += time.perf_counter() - began
        return answer

    for prompt in prompts:
        loaded, found = 0, timed(engine.lookup, prompt)
        if found:
            rows[:found, ::PAGE] ^= 0xFF
            loaded = timed(engine.load, prompt, found)
        record.wrong += sum(not np.array_equal(payload(prompt[at]), rows[at]) for at in range(loaded))
        for at in range(loaded, len(prompt)):
            rows[at] = payload(prompt[at])
        if loaded < len(prompt):
            before = record.seconds
            timed(engine.store, prompt, loaded)
            record.stores.append((record.seconds - before, len(prompt) - loaded))
        record.asked += len(prompt)
        record.loaded += loaded
        written = sum(_field(pid, "io", "write_bytes") for pid in engine.servers)
        record.written.append((time.perf_counter(), written))
    return record


def memory_is_ready(servers: Sequence[int]) -> None:
    """Waits until the memory of the servers has not grown for a second."""
    same, before = 0, 0
    while same < 4:
        time.sleep(0.25)
        now = sum(_field(pid, "status", "VmRSS") for pid in servers)
        same, before = (same + 1 if now <= before else 0), max(now, before)


def _leading(good: Iterable[bool]) -> int:
    return sum(1 for _ in takewhile(bool, good))


def _field(pid: int, file: str, name: str) -> int:
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/{file}").read_text().splitlines())
    return int(fields[name].split()[0])


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


@contextmanager
def _server(command: Sequence[Any], variables: Mapping[str, Any], port: int) -> Iterator[int]:
    """Its process id, once it listens."""
    env = os.environ | {name: str(value) for name, value in variables.items()}
    with subprocess.Popen([*map(str, command)], env=env, stdout=sys.stderr, stderr=sys.stderr) as server:
        try:
            give_up = time.monotonic() + _START_S
            while True:
                with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                    break
                assert server.poll() is None and time.monotonic() < give_up, f"{command[0]} did not start"
                time.sleep(0.05)
            yield server.pid
        finally:
            server.kill()


def main() -> None:
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries chat on standard output
    signal.signal(signal.SIGALRM, signal.default_int_handler)  # the servers end with the blocks that hold them
    signal.alarm(LIMIT_S)
    job = Job(**json.loads(sys.stdin.readline()))
    prompts = json.loads(sys.stdin.readline())
    with ENGINES[job.engine](job) as engine:
        if not job.cold:
            memory_is_ready(engine.servers)
        print(json.dumps(asdict(replay(engine, job, prompts))), file=output, flush=True)
    os._exit(0)  # without the farewells of libraries whose servers are gone


if __name__ == "__main__":
    main()
