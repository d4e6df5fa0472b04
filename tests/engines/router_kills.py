"""A router that follows a vLLM engine's events while engine and daemon are killed: vLLM's classes, Dynamo's index.

``router_kills.py HOME KILLS``: run by the engine's Python, with ai-dynamo-runtime. The engine is the scheduler's half
of the connector, in a forked process; it stores, drops and moves blocks. The router reads batches as vLLM publishes
them, keeps each block's media itself, and has Dynamo's index of the blocks that any medium has. Prints ``{"blocks": n,
"removed": n}`` once both equal the daemon's listing.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import sys
import time
from collections import defaultdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import torch
from dynamo._core import RadixTree, compute_block_hash_for_seq
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch
from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec

from kvtier import Client, Tier
from kvtier.abi.keys import chain_keys
from kvtier.connectors.vllm_events import KvEvents
from kvtier.engine import EngineOptions, Layout, PageGroup, PlaneLayout
from kvtier.engine.leader import Leader
from kvtier.errors import KvtierError
from kvtier.types import WritePolicy
from kvtier.wire import split_keys
from tests.integration.daemon import DaemonProcess

TOKENS, BYTES, WORKER = 16, 8192, 7
LAYOUT = Layout("router", TOKENS, (PageGroup((PlaneLayout("all", BYTES),)),))
SETTINGS = {"host_bytes": 64 * BYTES, "disk_bytes": 160 * BYTES, "write_policy": str(WritePolicy.BACK)}
MEDIA = {Tier.HOST: "CPU", Tier.DISK: "STORAGE"}
PATIENCE_S = 60.0

State = dict[int, set[str]]


def engine(address: str, pipe: Connection) -> None:
    """Publishes in its steps; between them it does what it is told."""
    spec = FullAttentionSpec(block_size=TOKENS, num_kv_heads=1, head_size=16, dtype=torch.float32)
    events = KvEvents(TOKENS, [KVCacheGroupSpec(["layer"], spec)])
    options = EngineOptions.of({"address": address, **SETTINGS}, events=True)
    leader = Leader(LAYOUT, options, events.note)
    encode = msgspec.msgpack.Encoder().encode
    while True:
        if pipe.poll(0.005):
            asked = pipe.recv()
            if asked == "list":
                pipe.send(listing(address, leader.name))
            else:
                live(address, leader.name, random.Random(asked))
        if taken := list(events.take()):
            pipe.send(encode(KVEventBatch(ts=time.time(), events=taken)))


def live(address: str, cache: str, draw: random.Random) -> None:
    try:
        with Client(address, timeout=2) as client:
            opened = client.open_cache(cache)
            for _ in range(draw.randrange(1, 12)):
                first = draw.randrange(6) * 1000
                ids = [*range(first, first + 3 * TOKENS), *[draw.randrange(4)] * TOKENS * draw.randrange(1, 9)]
                keys = split_keys(chain_keys(ids, TOKENS))
                match draw.randrange(6):
                    case 0:
                        opened.drop(keys[draw.randrange(len(keys)) :])
                    case 1:
                        opened.move(keys, Tier.DISK)
                    case _:
                        opened.put(keys, [bytes(BYTES)] * len(keys))
    except KvtierError:
        pass  # the daemon has been killed


def listing(address: str, cache: str) -> State | None:
    try:
        with Client(address, timeout=5) as client:
            rows = list(client.open_cache(cache).blocks())
    except KvtierError:
        return None
    return {
        maybe_convert_block_hash(BlockHash(row.key)): {m for tier, m in MEDIA.items() if row.residency & tier.bit}
        for row in rows
    }


class Router:
    def __init__(self) -> None:
        self.media: defaultdict[int, set[str]] = defaultdict(set)
        self.tree = RadixTree()
        self.removed = 0
        self._decoder = msgspec.msgpack.Decoder(KVEventBatch)
        self._events = 0

    @property
    def state(self) -> State:
        return {block: media for block, media in self.media.items() if media}

    @property
    def index(self) -> set[int]:
        found = set()
        for told in map(json.loads, self.tree.dump_tree_as_events()):
            found |= {block["block_hash"] for block in told["event"]["data"]["stored"]["blocks"]}
        return found

    def forget(self) -> None:
        """The engine has died: Dynamo forgets its blocks."""
        self.media.clear()
        self.tree.remove_worker(WORKER)

    def hear(self, payload: bytes) -> None:
        for event in self._decoder.decode(payload).events:
            assert not isinstance(event, AllBlocksCleared), "the engine's own blocks are still there"
            assert (event.locality, event.ownership) == ("LOCAL", "kvtier")
            (self._store if isinstance(event, BlockStored) else self._remove)(event)

    def _store(self, event: Any) -> None:
        assert event.kv_cache_spec_kind == "full_attention" and event.block_size == TOKENS
        parent = event.parent_block_hash
        for place, block in enumerate(event.block_hashes):
            if not self.media[block]:
                ids = event.token_ids[place * TOKENS : (place + 1) * TOKENS]
                tokens = compute_block_hash_for_seq(ids, TOKENS)[0] if ids else block
                stored = {"parent_hash": parent, "blocks": [{"block_hash": block, "tokens_hash": tokens}]}
                self._apply({"stored": stored})
            self.media[block].add(event.medium)
            parent = block

    def _remove(self, event: BlockRemoved) -> None:
        for block in event.block_hashes:
            self.media[block].remove(event.medium)
            if not self.media[block]:
                self.removed += 1
                if block in self.index:  # Dynamo removes the blocks below a removed block, too, whatever their medium
                    self._apply({"removed": {"block_hashes": [block]}})

    def _apply(self, data: dict[str, Any]) -> None:
        self._events += 1
        self.tree.apply_event(WORKER, json.dumps({"event_id": self._events, "data": data}).encode())


class Site:
    def __init__(self, home: Path) -> None:
        self.daemon = DaemonProcess(home, {Tier.HOST: 1 << 20, Tier.DISK: 4 << 20})
        self.router = Router()
        self.process: Any = None
        self.daemon.start()
        self.begin()

    def begin(self) -> None:
        self.pipe, theirs = multiprocessing.Pipe()
        self.process = multiprocessing.get_context("fork").Process(target=engine, args=(self.daemon.address, theirs))
        self.process.start()
        theirs.close()

    def hear(self, seconds: float) -> Any:
        """Reads what comes in this time; returns a listing at once."""
        until = time.monotonic() + seconds
        while self.pipe.poll(max(0.0, until - time.monotonic())):
            message = self.pipe.recv()
            if not isinstance(message, bytes):
                return message
            self.router.hear(message)
        return None

    def kill_engine(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join()
        self.router.forget()
        self.begin()

    def kill_daemon(self) -> None:
        self.daemon.kill()
        self.daemon.start()

    def agree(self) -> State:
        truth: State | None = None
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until:
            self.pipe.send("list")
            truth = self.hear(10.0)
            self.hear(0.2)
            if truth is not None and truth == self.router.state and truth.keys() == self.router.index:
                return truth
        raise AssertionError(f"listed: {truth}\nheard: {self.router.state}\nindexed: {self.router.index}")


def main() -> None:
    home, kills = Path(sys.argv[1]), int(sys.argv[2])
    draw, site = random.Random(kills), Site(home)
    for number in range(kills):
        site.pipe.send(draw.randrange(1 << 30))
        site.hear(draw.uniform(0, 0.3))
        draw.choice((site.kill_engine, site.kill_daemon))()
        if number % 10 == 9:
            site.agree()
    site.pipe.send(kills)
    truth = site.agree()
    os.kill(site.process.pid, signal.SIGKILL)
    site.process.join()
    site.daemon.stop()
    print(json.dumps({"blocks": len(truth), "removed": site.router.removed}))


if __name__ == "__main__":
    main()
