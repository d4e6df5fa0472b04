"""A scheduler that does at random what engines do, and looks at every byte that attention would read.

A free page holds 255 everywhere. It is wiped the moment the contract of :mod:`kvtier.engine` gives it back: a copy that
is still under way then stores wrong bytes, or writes into a page that is not its own. Both are seen.
"""

import random
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from kvtier.engine import CopyResult, EngineOptions, KeyChain, Layout, Mover, Planner, TokenChain
from kvtier.engine.work import NO_PAGE
from tests.engine.toy import Worker, sent, wait_until

STALL_S: Final = 1.0
"""No call of the planner sleeps so long. A call that waited for a stopped daemon would sleep for `load_timeout`, two
seconds: the walk itself lets the daemon go on."""
_GARBAGE: Final = 77
_VOCABULARY: Final = 50


@dataclass(eq=False)
class Job:
    """A request. ``done``: tokens whose pages are right. ``lost``: from this block on they are wrong, and the
    scheduler has not heard. ``state``: waiting, loading, running or over."""

    name: str
    tokens: list[int]
    total: int
    chain: KeyChain
    done: int = 0
    loaded: int = 0
    lost: int | None = None
    state: str = "waiting"
    known: bool = False
    starved: bool = False
    tables: dict[int, list[int]] = field(default_factory=dict)

    @property
    def risk(self) -> float:
        """How likely its pages are taken away now, or it is stopped."""
        return 0.5 if self.lost is not None or self.starved else 0.01


class FaultyMover(Mover):
    """At times it is late, and cannot load or save."""

    chances: random.Random
    late = broken = unsaved = 0.0

    def _arrived(self, group: int, keys: bytes, rows: Any) -> int:
        self._dawdle()
        if self.chances.random() < self.broken:
            some = self.chances.randrange(len(rows) + 1)
            return super()._arrived(group, keys[: 32 * some], rows[:some])
        return super()._arrived(group, keys, rows)

    def _save(self, save: Any, rows: Any, copying: Any) -> None:
        self._dawdle()
        super()._save(save, None if self.chances.random() < self.unsaved else rows, copying)

    def _dawdle(self) -> None:
        if self.chances.random() < self.late:
            time.sleep(self.chances.random() * 0.02)


class Walk:
    """An engine with few pages. ``trouble``: chances that a copy fails or is late."""

    def __init__(
        self,
        address: str,
        layout: Layout,
        seed: int,
        *,
        planner: type[Planner] = Planner,
        mover: type[FaultyMover] = FaultyMover,
        pages: int = 40,
        late: float = 0.2,
        broken: float = 0.05,
        unsaved: float = 0.05,
        **settings: Any,
    ) -> None:
        self.random = random.Random(seed)
        self.layout = layout
        options = EngineOptions.of({"address": address, "load_timeout": 0.5, "pin_wait": 0.02, **settings})
        self.planner = planner.open(layout, options)
        self.workers = [Worker(layout, options, rank, pages, mover) for rank in range(layout.ranks)]
        for worker in self.workers:
            worker.mover.chances = random.Random(seed + worker.rank)
            worker.mover.late, worker.mover.broken, worker.mover.unsaved = late, broken, unsaved
        self.ahead = self.random.randrange(2)
        """Steps that are planned before the outcomes of one are heard."""
        self._unheard: deque[tuple[list[CopyResult], list[Job]]] = deque()
        self.told: list[deque[CopyResult]] = [deque() for _ in self.workers]
        self.free = [list(range(pages)) for _ in layout.groups]
        self.jobs: list[Job] = []
        self.keys: dict[bytes, None] = {}
        self.names = iter(range(1 << 30))
        self.prompts = [self.random.choices(range(_VOCABULARY), k=60) for _ in range(3)]
        self.counts: Counter[str] = Counter()
        self.slowest = (0.0, "")

    # -- what the engine does --------------------------------------------------------------------------------------

    def step(self) -> None:
        while sum(job.state != "over" for job in self.jobs) < 7 and self.random.random() < 0.5:
            self._submit()
        taken = [self._take_away(job) for job in list(self.jobs) if self.random.random() < job.risk]
        batch = self._schedule()
        for job, new in batch.items():
            self._ask("scheduled", job.name, job.done, new, job.tables, chain=None if job.known else job.chain)
            job.known = True
        work = sent(self._ask("step"))
        for worker in self.workers:
            worker.mover.start(work)
        for tables in taken:
            self._give(tables)
        for worker in self.workers:
            worker.mover.wait_loads()
        failed: list[tuple[int, int]] = []
        for worker in self.workers:
            failed += [(group, page) for group, pages in worker.mover.failed_pages().items() for page in pages]
        for job in [each for each in self.jobs if each.state == "running"]:
            self._forward(job, batch.get(job, 0), set(failed))
        time.sleep(self.random.random() * 0.004)  # a forward pass takes its time
        leaving = self._leaving(batch)
        for worker in self.workers:
            worker.mover.save()
            if leaving:
                worker.mover.flush(leaving, patience=self.random.choice([0.0, 0.01]))
        for group, pages in leaving.items():
            self._wipe(group, pages)
        self._unheard.append((self._outcomes(), [job for job in self.jobs if job.lost is not None]))
        while len(self._unheard) > self.ahead:
            self._hear(*self._unheard.popleft())
        for job in batch:
            if job.state == "running" and job.done >= len(job.tokens):
                self._decode(job)

    def _submit(self) -> None:
        prompt = self.random.choice(self.prompts)[: self.random.randrange(2, 60)]
        prompt += self.random.choices(range(_VOCABULARY), k=self.random.randrange(6))
        chain = TokenChain(self.layout.tokens)
        chain.extend(prompt)
        total = len(prompt) + self.random.randrange(10)
        self.jobs.append(Job(f"r{next(self.names)}", prompt, total, chain))

    def _take_away(self, job: Job) -> dict[int, list[int]]:
        """Preempts, aborts or stops it. Returns its pages, which stay until the next work was begun."""
        how = self.random.choice(["aborted", "preempted", "stopped"])
        if job.state == "over":
            how = "aborted"
        elif job.lost is not None or job.starved:
            how = "preempted" if job.lost is None else "stopped"
        self.counts[f"{how} while {job.state}"] += 1
        if how == "stopped":
            self._finish(job)
            return {}
        self._ask(how, job.name)
        if how == "aborted":
            self.jobs.remove(job)
        job.done, job.state, job.lost, job.starved = 0, "waiting", None, False
        tables, job.tables = job.tables, {}
        return tables

    def _finish(self, job: Job) -> None:
        """Its pages are free as soon as kvtier needs them no more."""
        windows = any(group.window for group in self.layout.groups)
        if self._ask("finished", job.name, job.tables if windows or self.random.random() < 0.5 else None):
            job.state = "over"
            self.counts["pages live longer"] += 1
        else:
            self._remove(job)

    def _schedule(self) -> dict[Job, int]:
        batch: dict[Job, int] = {}
        for job in self.jobs:
            if job.state == "waiting" and len(batch) < 5:
                self._admit(job)
            if job.state == "running" and self.random.random() < 0.9:
                new = min(self.random.randrange(1, 14), len(job.tokens) - job.done)
                job.starved = not self._grow(job, job.done + new)
                if not job.starved:
                    batch[job] = new
        return batch

    def _admit(self, job: Job) -> None:
        offered = self._ask("offer", job.name, job.chain, 0, total_tokens=len(job.tokens))
        job.known = True
        if offered is None:
            self.counts["ask again"] += 1
            return
        if self.random.random() < 0.1:
            return
        assert 0 <= offered < len(job.tokens) and offered % self.layout.tokens == 0
        takes = offered
        if offered and (chance := self.random.random()) < 0.2:
            takes = 0 if chance < 0.1 else self.layout.tokens * self.random.randrange(offered // self.layout.tokens)
        job.tables = {group: [] for group in range(len(self.layout.groups))}
        job.loaded = takes // self.layout.tokens
        if not self._grow(job, takes, first={g: self._needs(g, job.loaded) for g in job.tables}):
            self._give(job.tables)
            job.tables = {}
            return
        self.counts["offered"] += bool(offered)
        self.counts["taken"] += bool(takes)
        sync = not self._ask("is_async", job.name) if self.random.random() < 0.5 else self.random.random() < 0.5
        self._ask("allocated", job.name, job.tables, takes, sync=sync)
        job.done, job.state = takes, "running" if sync or not takes else "loading"

    def _grow(self, job: Job, tokens: int, first: Mapping[int, Sequence[int]] | None = None) -> bool:
        """Pages for so many tokens. ``first``: the only blocks that are wanted."""
        blocks = -(-tokens // self.layout.tokens)
        for group, table in job.tables.items():
            wanted = [at for at in range(len(table), blocks) if first is None or at in first[group]]
            if len(wanted) > len(self.free[group]):
                return False
        for group, table in job.tables.items():
            for at in range(len(table), blocks):
                table.append(self._hand_out(group) if first is None or at in first[group] else NO_PAGE)
        return True

    def _forward(self, job: Job, new: int, failed: set[tuple[int, int]]) -> None:
        """Computes, on wrong bytes too: the scheduler hears later of what did not arrive."""
        size, end = self.layout.tokens, job.done + new
        reads = {group: self._needs(group, job.done // size) for group in job.tables}
        missing = [at for g, blocks in reads.items() for at in blocks if (g, job.tables[g][at]) in failed]
        if missing and job.lost is None:
            job.lost = min(missing)
        for group, table in job.tables.items():
            for block in reads[group] if job.lost is None else ():
                assert table[block] != NO_PAGE, f"{job.name}: no page for block {block} of group {group}"
                for worker in self.workers:
                    there = worker.holds(group, table[block], job.chain.key(block))
                    assert there, f"{job.name}: block {block} of group {group}, rank {worker.rank} is not there"
            for block in range(job.done // size, end // size):
                for worker in self.workers:
                    if job.lost is not None:
                        for plane in worker.memory[group].values():
                            plane[table[block]] = _GARBAGE
                    else:
                        worker.compute(group, table[block], job.chain.key(block))
        self.keys |= dict.fromkeys(job.chain.key(block) for block in range(end // size))
        self.counts["steps computed"] += 1
        job.done = end

    def _leaving(self, batch: Mapping[Job, int]) -> dict[int, list[int]]:
        """Pages that a window leaves behind with this step: they are another's with the next."""
        leaving: dict[int, list[int]] = {}
        for job in batch:
            for group, table in job.tables.items():
                kept = self._needs(group, job.done // self.layout.tokens)
                for block in range(job.done // self.layout.tokens):
                    if table[block] != NO_PAGE and block not in kept:
                        leaving.setdefault(group, []).append(table[block])
                        table[block] = NO_PAGE
        return leaving

    def _outcomes(self, *, all_of_them: bool = False) -> list[CopyResult]:
        """Those of a rank in their order; the last ones may come with a later step."""
        now = []
        for worker, told in zip(self.workers, self.told, strict=True):
            told.extend(worker.mover.poll())
            many = len(told) if all_of_them or self.random.random() < 0.8 else self.random.randrange(len(told) + 1)
            now += [told.popleft() for _ in range(many)]
        return now

    def _hear(self, outcomes: Sequence[CopyResult], lost: Sequence[Job] = ()) -> None:
        now = list(outcomes)
        done = self._ask("completed", sent(now))
        failed = {(group, page) for group, pages in done.failed_pages.items() for page in pages}
        for job in list(self.jobs):
            if job.name in done.loaded and job.state == "loading":
                job.state = "running"
                for group, table in job.tables.items():
                    gone = [at for at, page in enumerate(table) if (group, page) in failed]
                    if gone:
                        self._go_back(job, min(gone))
                        break
            if job.name in done.saved:
                assert job.state == "over", f"{job.name} is {job.state}, and told as saved"
                self._remove(job)
        for job in lost:
            if job.state == "running" and job.lost is not None:
                self._go_back(job, job.lost)

    def _go_back(self, job: Job, first: int) -> None:
        """From a block that did not arrive on it is computed anew; with windows, all is."""
        self.counts["failed loads"] += 1
        if any(group.window for group in self.layout.groups):
            first = 0
        job.done, job.loaded, job.lost = first * self.layout.tokens, first, None
        for group, table in job.tables.items():
            for at, page in enumerate(table):
                if page == NO_PAGE and len(self.free[group]) == 0:
                    self._ask("preempted", job.name)
                    job.done, job.state = 0, "waiting"
                    work = sent(self._ask("step"))
                    for worker in self.workers:
                        worker.mover.start(work)
                    self._give(job.tables)
                    job.tables = {}
                    return
                if page == NO_PAGE:
                    table[at] = self._hand_out(group)

    def _decode(self, job: Job) -> None:
        if len(job.tokens) < job.total:
            job.tokens.append(sum(job.tokens) % _VOCABULARY)
            job.chain.extend(job.tokens[-1:])
            return
        self._finish(job)

    def _remove(self, job: Job) -> None:
        self.jobs.remove(job)
        self._give(job.tables)
        self.counts["finished"] += 1

    # -- its pages -------------------------------------------------------------------------------------------------

    def _needs(self, group: int, blocks: int) -> list[int]:
        needed = self.layout.spec.attention(group).needs(blocks)
        sinks = -(-self.layout.groups[group].sink // self.layout.tokens)
        return sorted({*range(min(sinks, blocks)), *range(needed.first, blocks)})

    def _hand_out(self, group: int) -> int:
        page = self.free[group].pop(self.random.randrange(len(self.free[group])))
        for worker in self.workers:
            for plane in worker.memory[group].values():
                assert (plane[page] == 255).all(), f"page {page} of group {group} was written when it was free"
        return page

    def _wipe(self, group: int, pages: Sequence[int]) -> None:
        for worker in self.workers:
            for page in pages:
                worker.wipe(group, page)
        self.free[group] += pages

    def _give(self, tables: Mapping[int, Sequence[int]]) -> None:
        for group, table in tables.items():
            self._wipe(group, [page for page in table if page != NO_PAGE])

    # -- its end ---------------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Ends all requests, some in the midst."""
        while self._unheard:
            self._hear(*self._unheard.popleft())
        for job in list(self.jobs):
            if job.state != "over":
                self._finish(job)

        def over() -> bool:
            work = sent(self._ask("step"))
            for worker in self.workers:
                worker.mover.start(work)
                worker.mover.wait_loads()
                worker.mover.save()
            self._hear(self._outcomes(all_of_them=True))
            return not self.jobs and not self.planner.pending

        wait_until(over)
        for group in range(len(self.layout.groups)):
            pages = len(next(iter(self.workers[-1].memory[group].values())))
            assert sorted(self.free[group]) == list(range(pages))
            for _ in range(pages):
                self._hand_out(group)

    @property
    def left_in_planner(self) -> dict[str, int]:
        names = ("_requests", "_scheduled", "_tickets", "_committing", "_being_saved", "_loads", "_saves", "_flush")
        return {name: len(there) for name in names if (there := getattr(self.planner, name))}

    def close(self) -> None:
        for worker in self.workers:
            worker.mover.close()
        self.planner.close()

    def _ask(self, verb: str, *given: Any, **named: Any) -> Any:
        """A call of the planner, and how long it slept."""
        began, waited = time.monotonic(), _computing_s()
        answer = getattr(self.planner, verb)(*given, **named)
        slept = time.monotonic() - began - (_computing_s() - waited)
        self.slowest = max(self.slowest, (slept, verb))
        return answer


def _computing_s() -> float:
    """How long this thread has run, or was ready to and had no core."""
    with open("/proc/thread-self/schedstat") as line:
        ran, ready, _ = line.read().split()
    return (int(ran) + int(ready)) / 1e9


@contextmanager
def walk(address: str, layout: Layout, seed: int, **settings: Any) -> Iterator[Walk]:
    made = Walk(address, layout, seed, **settings)
    try:
        yield made
    finally:
        made.close()
