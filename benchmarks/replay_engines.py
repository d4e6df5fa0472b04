"""One engine of ``benchmarks.replay`` in a process of its own, with the engine's interpreter: it replays the requests.

It reads a :class:`Job` as a line of JSON and the requests as another, and writes a :class:`Record`. An adapter starts
the engine's servers and translates three verbs; this process does the rest alike for all of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.uint8]
"""Blocks one after the other: ``[block, byte]``."""

STEP: Final = 4096
LIMIT_S: Final = 900
"""For one replay."""
_START_S: Final = 60.0
_INSIST_S: Final = 15.0
"""How long a store that is refused for want of room is repeated."""


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


class Engine(Protocol):
    """A prompt is a list of block numbers. ``rows``: where blocks are computed, a row a block of the prompt.
    ``servers``: ids of the processes that keep blocks."""

    rows: Rows
    servers: Sequence[int]

    def lookup(self, prompt: Sequence[int]) -> int:
        """How many blocks of the prompt, from its first, are there."""

    def load(self, prompt: Sequence[int], found: int) -> int:
        """Copies so many blocks into the first rows. Returns how many came."""

    def store(self, prompt: Sequence[int], first: int) -> None:
        """Stores the blocks from ``first`` on, out of their rows."""


# -- the engines -------------------------------------------------------------------------------------------------------


class Kvtier:
    def __init__(self, job: Job, address: str, pid: int) -> None:
        from kvtier import CacheSpec, sync

        self.servers: Sequence[int] = (pid,)
        self.rows = np.zeros((job.longest, job.block_bytes), np.uint8)
        spec = CacheSpec.single(
            "replay", "uint8", tokens_per_block=16, layers=1, kv_heads=1, head_size=job.block_bytes // 16, kv_factor=1
        )
        self._client = sync.Client(address, timeout=_START_S)
        self._cache = self._client.open_cache("replay", spec)
        self._keys = [hashlib.sha256(str(block).encode()).digest() for block in range(job.distinct)]

    def lookup(self, prompt: Sequence[int]) -> int:
        return self._cache.prefix_length(self._packed(prompt))

    def load(self, prompt: Sequence[int], found: int) -> int:
        return len(self._cache.get(self._packed(prompt[:found]), self.rows[:found]))

    def store(self, prompt: Sequence[int], first: int) -> None:
        parent = self._keys[prompt[first - 1]] if first else None
        self._cache.put(self._packed(prompt[first:]), self.rows[first : len(prompt)], parent=parent)

    def close(self) -> None:
        self._client.close()

    def _packed(self, prompt: Sequence[int]) -> bytes:
        return b"".join(self._keys[block] for block in prompt)


@contextmanager
def kvtier(job: Job) -> Iterator[Engine]:
    from kvtier import Tier
    from kvtier.replay.private import PrivateDaemon

    # A slot of the disk also has a header.
    sizes = {Tier.HOST: job.memory * job.block_bytes, Tier.DISK: job.disk * (job.block_bytes + STEP)}
    with asyncio.Runner() as runner:
        daemon = PrivateDaemon(sizes, keep=Path(job.home))
        runner.run(daemon.__aenter__())
        try:
            with contextlib.closing(Kvtier(job, daemon.address, daemon.pid)) as engine:
                yield engine
        finally:
            with suppress(TimeoutError):  # it is killed then; the system needs long to free much memory
                runner.run(daemon.__aexit__(None, None, None))


class Mooncake:
    """A client without storage that shares memory with the process that owns it all."""

    def __init__(self, job: Job, address: str, servers: Sequence[int]) -> None:
        from mooncake.store import MooncakeDistributedStore

        self.servers: Sequence[int] = servers
        nbytes = job.longest * job.block_bytes
        self._store: Any = MooncakeDistributedStore()
        assert self._store.setup_dummy(nbytes + (64 << 20), 16 << 20, address) == 0
        start = self._store.alloc_from_mem_pool(nbytes)
        assert start and self._store.register_buffer(start, nbytes) == 0
        memory = memoryview((ctypes.c_uint8 * nbytes).from_address(start))
        self.rows: Rows = np.frombuffer(memory, np.uint8).reshape(job.longest, job.block_bytes)
        self.rows[:] = 0
        self._places = [start + row * job.block_bytes for row in range(job.longest)]
        self._sizes = [job.block_bytes] * job.longest
        self._keys = [f"block-{block}" for block in range(job.distinct)]

    def lookup(self, prompt: Sequence[int]) -> int:
        return _leading(code == 1 for code in self._store.batch_is_exist([self._keys[block] for block in prompt]))

    def load(self, prompt: Sequence[int], found: int) -> int:
        keys = [self._keys[block] for block in prompt[:found]]
        codes = self._store.batch_get_into(keys, self._places[:found], self._sizes[:found])
        return _leading(code == size for code, size in zip(codes, self._sizes, strict=False))

    def store(self, prompt: Sequence[int], first: int) -> None:
        give_up = time.monotonic() + _INSIST_S
        while first < len(prompt):
            keys = [self._keys[block] for block in prompt[first:]]
            codes = self._store.batch_put_from(
                keys, self._places[first : len(prompt)], self._sizes[first : len(prompt)]
            )
            first += _leading(code == 0 for code in codes)
            if first < len(prompt):
                if time.monotonic() > give_up:
                    break
                time.sleep(0.002)


@contextmanager
def mooncake(job: Job) -> Iterator[Engine]:
    import mooncake as package

    programs = Path(package.__file__).parent
    rpc, metrics, client = (_free_port() for _ in range(3))
    nbytes, disk = job.memory * job.block_bytes, job.disk * job.block_bytes
    master = [f"-rpc_port={rpc}", "-rpc_address=127.0.0.1", f"-metrics_port={metrics}", "-metrics_host=127.0.0.1"]
    master.append("-default_kv_lease_ttl=500")  # ms; within its default of 10 s nothing looked up can be evicted
    owner = [f"-port={client}", "-host=127.0.0.1", f"-master_server_address=127.0.0.1:{rpc}"]
    owner += ["-metadata_server=P2PHANDSHAKE", f"-global_segment_size={nbytes}"]
    variables: dict[str, str] = {}
    if disk:
        master.append("-enable_offload=true")
        owner.append("-enable_offload=true")
        variables = {
            "MOONCAKE_OFFLOAD_FILE_STORAGE_PATH": job.home,
            "MOONCAKE_OFFLOAD_TOTAL_SIZE_LIMIT_BYTES": str(disk),
            "MOONCAKE_OFFLOAD_BUCKET_MAX_TOTAL_SIZE": str(disk),
            "MOONCAKE_OFFLOAD_BUCKET_SIZE_LIMIT_BYTES": str(nbytes // 8),
            "MOONCAKE_OFFLOAD_LOCAL_BUFFER_SIZE_BYTES": str(1 << 30),
            "MOONCAKE_OFFLOAD_HEARTBEAT_INTERVAL_SECONDS": "1",
        }
    with (
        _server([programs / "mooncake_master", *master], {}, rpc) as first,
        _server([programs / "mooncake_client", *owner], variables, client) as second,
    ):
        yield Mooncake(job, f"127.0.0.1:{client}", (first, second))


class LMCache:
    """A chunk of 16 tokens is a block, in one tensor that the server copies out of and into."""

    def __init__(self, job: Job, port: int, servers: Sequence[int]) -> None:
        from lmcache.cli.commands.bench.server_bench import client, config, helpers

        self.servers: Sequence[int] = servers
        blocks = 1 + job.longest  # it never stores block 0, an engine's null block
        shape = f"(1,{blocks},{_TOKENS},1,{job.block_bytes // _TOKENS}):uint8:1"
        asked = config.BenchConfig(
            f"tcp://127.0.0.1:{port}", "", "cpu", "lmcache_driven", 1, False, 0, shape, blocks, _TOKENS
        )
        self._client = client.ServerBenchClient(asked, lambda line: None)
        self._client.start()
        self._helpers = helpers
        self._calls: Any = self._client._req_client
        (worker,) = self._client._workers
        self.rows = worker.kv_caches["layer.0"].numpy().reshape(blocks, job.block_bytes)[1:]
        self._number = 0
        self._request: Any = None
        self._new_request = client.RequestContext

    def lookup(self, prompt: Sequence[int]) -> int:
        if self._request is not None:
            self._client.end_session(self._request)
        self._number += 1
        tokens = tuple(block for block in prompt for _ in range(_TOKENS))
        name = f"request-{self._number}"
        self._request = self._new_request(
            self._number, name, "", tokens, len(tokens), len(prompt), _TOKENS, 1, len(prompt)
        )
        key = self._helpers._make_key(tokens, name, start=0, end=len(tokens))
        assert self._helpers._send_lookup(self._calls, key)
        return int(self._calls.wait_prefetch_status(name, _START_S).result(timeout=_START_S))

    def load(self, prompt: Sequence[int], found: int) -> int:
        done = self._client.retrieve(self._request, 0, found * _TOKENS)
        return found if done is not None and done.succeeded else 0

    def store(self, prompt: Sequence[int], first: int) -> None:
        self._client.store(self._request, first * _TOKENS, (len(prompt) - first) * _TOKENS)


_TOKENS: Final = 16


@contextmanager
def lmcache(job: Job) -> Iterator[Engine]:
    port, http = _free_port(), _free_port()
    command = [sys.executable, "-m", "lmcache.cli.main", "server", "--host", "127.0.0.1", "--port", port]
    command += ["--http-host", "127.0.0.1", "--http-port", http, "--chunk-size", _TOKENS, "--disable-observability"]
    command += ["--l1-size-gb", job.memory * job.block_bytes / (1 << 30), "--eviction-policy", "LRU"]
    if job.disk:
        gigabytes = job.disk * job.block_bytes / (1 << 30)
        disk = {"type": "fs_native", "base_path": job.home, "max_capacity_gb": gigabytes}
        command += ["--l2-adapter", json.dumps(disk | {"eviction": {"eviction_policy": "LRU"}})]
    with _server(command, {"LMCACHE_TRACK_USAGE": "false", "LMCACHE_LOG_LEVEL": "WARNING"}, http) as server:
        yield LMCache(job, port, (server,))


ENGINES: Final[Mapping[str, Callable[[Job], AbstractContextManager[Engine]]]] = {
    "kvtier": kvtier,
    "mooncake": mooncake,
    "lmcache": lmcache,
}


# -- the replay --------------------------------------------------------------------------------------------------------


class Payload:
    """The bytes of a block: a window of one random pattern, at a place of its own. No word of two blocks, or of two
    places in one, is the same."""

    def __init__(self, block_bytes: int, distinct: int) -> None:
        self._pattern = np.random.default_rng(0).integers(0, 256, distinct * STEP + block_bytes, np.uint8)
        self._nbytes = block_bytes

    def of(self, block: int) -> Rows:
        return self._pattern[block * STEP : block * STEP + self._nbytes]


def replay(engine: Engine, job: Job, prompts: Sequence[Sequence[int]]) -> Record:
    """Only the three verbs are timed. Before a load, rows are spoilt in every page; after it every byte is compared."""
    record, payload = Record(), Payload(job.block_bytes, job.distinct)
    for prompt in prompts:
        began = time.perf_counter()
        found = engine.lookup(prompt)
        record.seconds += time.perf_counter() - began
        loaded = 0
        if found:
            engine.rows[:found, ::STEP] ^= 0xFF
            began = time.perf_counter()
            loaded = engine.load(prompt, found)
            record.seconds += time.perf_counter() - began
        pairs = zip(prompt[:loaded], engine.rows, strict=False)
        record.wrong += sum(not np.array_equal(payload.of(block), row) for block, row in pairs)
        for block, row in zip(prompt[loaded:], engine.rows[loaded:], strict=False):
            row[:] = payload.of(block)
        if loaded < len(prompt):
            began = time.perf_counter()
            engine.store(prompt, loaded)
            record.stores.append((time.perf_counter() - began, len(prompt) - loaded))
            record.seconds += record.stores[-1][0]
        record.asked += len(prompt)
        record.loaded += loaded
        record.written.append((time.perf_counter(), sum(map(_written, engine.servers))))
    return record


def _leading(good: Iterator[bool]) -> int:
    return sum(1 for _ in takewhile(bool, good))


def memory_is_ready(servers: Sequence[int]) -> None:
    """Waits until the memory of the servers has not grown for a second."""
    same, before = 0, 0
    while same < 4:
        time.sleep(0.25)
        now = sum(_field(pid, "status", "VmRSS") for pid in servers)
        same, before = (same + 1 if now <= before else 0), max(now, before)


def _written(pid: int) -> int:
    return _field(pid, "io", "write_bytes")


def _field(pid: int, file: str, name: str) -> int:
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/{file}").read_text().splitlines())
    return int(fields[name].split()[0])


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


@contextmanager
def _server(command: Sequence[Any], variables: Mapping[str, str], port: int) -> Iterator[int]:
    """Its process id, once it listens."""
    with subprocess.Popen(
        [str(word) for word in command],
        env=os.environ | variables,
        stdout=sys.stderr,
        stderr=sys.stderr,
    ) as server:
        try:
            give_up = time.monotonic() + _START_S
            while True:
                with suppress(OSError):
                    socket.create_connection(("127.0.0.1", port), 1).close()
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
        record = replay(engine, job, prompts)
        print(json.dumps(asdict(record)), file=output, flush=True)
    os._exit(0)  # without the farewells of libraries whose servers are gone


if __name__ == "__main__":
    main()
