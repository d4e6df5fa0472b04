"""A toy inference engine: its KV bytes are a function of the block's key, so that every page can be checked."""

import hashlib
import pickle
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvtier import Client
from kvtier.engine import EngineOptions, GroupPages, KeyChain, Layout, Mover, PageGroup, PlaneLayout, Planner
from kvtier.engine.request import TokenChain

TOKENS: Final = 4
PLAIN: Final = Layout("toy", TOKENS, (PageGroup((PlaneLayout("l0.k", 5000), PlaneLayout("l0.v", 4096))),))
_FIRST: Final = PlaneLayout("0.k", 3000), PlaneLayout("0.latent", 200, replicated=True)
_SECOND: Final = PlaneLayout("1.k", 500), PlaneLayout("1.latent", 700, replicated=True)
_NEAR: Final = PageGroup((PlaneLayout("1.near", 900),), window=3 * TOKENS)
STAGES: Final = Layout.of_stages(
    [
        Layout("stages", TOKENS, (PageGroup(_FIRST), replace(_NEAR, planes=())), ranks=2),
        Layout("stages", TOKENS, (PageGroup(_SECOND), _NEAR), ranks=2),
    ]
)
"""The name of a plane begins with its stage."""
PATIENCE_S: Final = 60.0
T = TypeVar("T")
ALL: Final = 1 << 30


def content(key: bytes, group: int, plane: PlaneLayout, rank: int) -> NDArray[np.uint8]:
    """What the model computes for a block."""
    who = b"all" if plane.replicated else str(rank).encode()
    seed = hashlib.sha256(key + str(group).encode() + plane.name.encode() + who).digest()
    return np.resize(np.frombuffer(seed, np.uint8), plane.nbytes)


M_co = TypeVar("M_co", bound=Mover, covariant=True)


class Worker(Generic[M_co]):
    """One rank: its pages and its mover. A page that is free holds 255 everywhere."""

    def __init__(self, layout: Layout, options: EngineOptions, rank: int, pages: int, mover: type[M_co]) -> None:
        stage, of_stage = divmod(rank, layout.ranks_per_stage)
        self.rank, self.shard = rank, of_stage // layout.replicas
        self.layout = layout
        self.planes = [
            [each for each in group.planes if layout.stages == 1 or each.name.startswith(f"{stage}.")]
            for group in layout.groups
        ]
        self.memory = [
            {plane.name: np.full((pages, plane.nbytes), 255, np.uint8) for plane in planes} for planes in self.planes
        ]
        arrays = [GroupPages(group, planes) for group, planes in enumerate(self.memory)]
        self.mover = mover(layout, options, arrays, rank=rank)

    def compute(self, group: int, page: int, key: bytes) -> None:
        for plane in self.planes[group]:
            self.memory[group][plane.name][page] = content(key, group, plane, self.shard)

    def wipe(self, group: int, page: int) -> None:
        for plane in self.memory[group].values():
            plane[page] = 255

    def holds(self, group: int, page: int, key: bytes) -> bool:
        return all(
            np.array_equal(self.memory[group][plane.name][page], content(key, group, plane, self.shard))
            for plane in self.planes[group]
        )


@dataclass
class Run:
    """One request: how many of its blocks were loaded and computed, and how often a load failed."""

    name: str
    chain: KeyChain
    tokens: int
    loaded: int = 0
    computed: int = 0
    failed: int = 0
    waits: bool = False
    """Its load goes on beside the steps of other requests."""
    table: dict[int, list[int]] = field(default_factory=dict)


class Engine:
    """A scheduler and its workers, in one process. ``pages``: of each group."""

    def __init__(self, address: Any, layout: Layout = PLAIN, pages: int = 64, **settings: Any) -> None:
        options = EngineOptions.of({"address": str(address), **settings})
        self.layout = layout
        self.planner = Planner.open(layout, options)
        self.workers = [Worker(layout, options, rank, pages, Mover) for rank in range(layout.ranks)]
        if self.planner.leader.answers:
            for worker in self.workers:
                worker.mover.open()
        self.free = [list(range(pages)) for _ in layout.groups]
        self.random = random.Random(7)
        self.count = 0
        self.pending = 0
        """Offers that had no answer yet."""
        self.saved: set[str] = set()
        self.loaded: set[str] = set()

    def run(self, tokens: Sequence[int], *, chunk: int = ALL) -> Run:
        run = self.begin(tokens)
        self.complete(run, chunk=chunk)
        self.end(run)
        return run

    def begin(self, tokens: Sequence[int]) -> Run:
        """A request with its pages, of which what kvtier has is on its way."""
        self.count += 1
        run = Run(f"r{self.count}", self.chain(tokens), len(tokens))
        offered = self.offered(run)
        run.loaded = offered // self.layout.tokens
        blocks = -(-run.tokens // self.layout.tokens)
        for group in range(len(self.layout.groups)):
            first = self.layout.spec.attention(group).first_block(run.loaded)
            run.table[group] = [-1] * first + self.pages(group, blocks - first)
        run.waits = offered > 0 and self.planner.is_async(run.name)
        self.planner.allocated(run.name, run.table, offered, sync=not run.waits)
        return run

    def offered(self, run: Run) -> int:
        """Tokens, asked for until there is an answer."""
        answers: list[int] = []

        def ask() -> bool:
            offered = self.planner.offer(run.name, run.chain, 0, total_tokens=run.tokens)
            self.pending += offered is None
            answers.extend([] if offered is None else [offered])
            return bool(answers)

        wait_until(ask)
        return answers[0]

    def complete(self, run: Run, *, chunk: int = ALL) -> None:
        """Loads, computes the rest in steps of at most ``chunk`` tokens, and checks every page that attention reads."""
        if run.waits:
            self.until(lambda: run.name in self.loaded)
            self.forget_failed(run)
        done = run.loaded * self.layout.tokens
        while done < run.tokens:
            step = min(chunk, run.tokens - done)
            self.planner.scheduled(run.name, done, step, run.table, chain=run.chain)
            self.begin_step()
            if self.forget_failed(run):  # the pass was in vain
                done = run.loaded * self.layout.tokens
                self.end_step()
                continue
            end = done + step
            for block in range(done // self.layout.tokens, end // self.layout.tokens):
                for group, table in run.table.items():
                    for worker in self.workers:
                        if table[block] >= 0:
                            worker.compute(group, table[block], run.chain.key(block))
                run.computed += 1
            done = end
            self.check(run, done // self.layout.tokens)
            self.end_step()

    def forget_failed(self, run: Run) -> bool:
        """Cuts what was loaded to the blocks before the first that did not arrive. False: all did."""
        failed = [worker.mover.failed_pages() for worker in self.workers]
        for block in range(run.loaded):
            if any(table[block] in each.get(group, ()) for group, table in run.table.items() for each in failed):
                run.failed += 1
                run.loaded = block if len(self.layout.groups) == 1 else 0
                for group, table in run.table.items():
                    for missing in [at for at, page in enumerate(table) if page < 0]:
                        table[missing] = self.pages(group, 1)[0]
                return True
        return False

    def check(self, run: Run, blocks: int) -> None:
        for group, table in run.table.items():
            for block in range(self.layout.spec.attention(group).first_block(blocks), blocks):
                for worker in self.workers:
                    assert worker.holds(group, table[block], run.chain.key(block)), (group, block)

    def end(self, run: Run) -> None:
        """The request is over; its pages are free, and wiped, as soon as kvtier needs them no more."""
        if self.planner.finished(run.name):
            self.until(lambda: run.name in self.saved)
        self.give(run)

    def give(self, run: Run) -> None:
        for group, table in run.table.items():
            pages = [page for page in table if page >= 0]
            for worker in self.workers:
                for page in pages:
                    worker.wipe(group, page)
            self.free[group] += pages

    def settle(self) -> None:
        """Until every save is committed."""
        self.until(lambda: not self.planner.pending)

    def until(self, reached: Callable[[], bool]) -> None:
        """Goes on with steps that compute nothing."""

        def look() -> bool:
            self.begin_step()
            self.end_step()
            return reached()

        wait_until(look)

    def begin_step(self) -> None:
        work = sent(self.planner.step())
        for worker in self.workers:
            worker.mover.start(work)
        for worker in self.workers:
            worker.mover.wait_loads()

    def end_step(self) -> None:
        for worker in self.workers:
            worker.mover.save()
        outcomes = [each for worker in self.workers for each in worker.mover.poll()]
        done = self.planner.completed(sent(outcomes))
        self.saved |= done.saved
        self.loaded |= done.loaded

    def chain(self, tokens: Sequence[int]) -> KeyChain:
        chain = TokenChain(self.layout.tokens)
        chain.extend(tokens)
        return chain

    def pages(self, group: int, count: int) -> list[int]:
        self.random.shuffle(self.free[group])
        return [self.free[group].pop() for _ in range(count)]

    def close(self) -> None:
        for worker in self.workers:
            worker.mover.close()
        self.planner.close()


def assert_right(client: Client, toy: Any, keys: Iterable[bytes]) -> None:
    """That all that is stored of these keys has the bytes that the model computes."""
    layout = toy.layout
    cache = client.open_cache(toy.planner.leader.name)
    for group, planes in enumerate(each.planes for each in layout.groups):
        parts = [(plane, 0) for plane in planes if plane.replicated]
        shards = range(layout.ranks_per_stage // layout.replicas)
        parts += [(plane, shard) for shard in shards for plane in planes if not plane.replicated]
        for key in keys:
            for there in cache.in_group(group).get([key]):
                right = np.concatenate([content(key, group, plane, rank) for plane, rank in parts])
                assert np.array_equal(there, right), f"group {group}: wrong bytes are stored"


@contextmanager
def engine(address: Any, layout: Layout = PLAIN, **settings: Any) -> Iterator[Engine]:
    made = Engine(address, layout, **settings)
    try:
        yield made
    finally:
        made.close()


def sent(value: T) -> T:
    """As it arrives in another process."""
    arrived: T = pickle.loads(pickle.dumps(value))  # noqa: S301 - it is our own
    return arrived


def wait_until(reached: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not reached():
        assert time.monotonic() < end, "this takes too long"
        time.sleep(0.001)
