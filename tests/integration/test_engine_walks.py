"""Random walks of an engine over everything that can happen to its requests, to its ranks and to the daemon."""

import random
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Final

import pytest

from kvtier import Client
from kvtier.engine import STATE, Completed, CopyResult, Layout, PageGroup, PlaneLayout, Planner, Work
from tests.engine.toy import STAGES, TOKENS, assert_right, wait_until
from tests.engine.walk import STALL_S, FaultyMover, Walk, walk
from tests.integration.daemon import DaemonProcess

PLAIN: Final = Layout("plain", TOKENS, (PageGroup((PlaneLayout("k", 500), PlaneLayout("v", 4096))),))
HYBRID: Final = Layout(
    "hybrid",
    TOKENS,
    (PageGroup((PlaneLayout("full", 700),)), PageGroup((PlaneLayout("near", 900),), window=3 * TOKENS)),
)
SINKS: Final = Layout(
    "sinks",
    TOKENS,
    (PageGroup((PlaneLayout("near", 700),), window=3 * TOKENS, sink=TOKENS), PageGroup((PlaneLayout("full", 600),))),
)
RANKS: Final = Layout(
    "ranks", TOKENS, (PageGroup((PlaneLayout("heads", 300), PlaneLayout("latent", 200, replicated=True))),), ranks=2
)
STATES: Final = Layout(
    "states",
    TOKENS,
    (
        PageGroup((PlaneLayout("conv", 100), PlaneLayout("ssm", 800)), window=STATE),
        PageGroup((PlaneLayout("full", 600),)),
        PageGroup((PlaneLayout("conv", 100), PlaneLayout("ple", 200, replicated=True)), window=STATE),
    ),
    ranks=2,
)
LAYOUTS: Final = {layout.model: layout for layout in (PLAIN, HYBRID, SINKS, RANKS, STATES, STAGES)}
STEPS: Final = 100
MANY_SLOTS: Final = 2048
"""Slots of a group, of which a group of states gets a few: there is a state for every 1,024 blocks of a toy."""


class World:
    """What others do between two steps. ``rough``: to the daemon and its sessions, too."""

    def __init__(self, daemon: DaemonProcess, walk: Walk, seed: int, *, rough: bool) -> None:
        self._daemon = daemon
        self._walk = walk
        self._random = random.Random(seed)
        self._deeds = {self._evict: 0.06, self._reset: 0.005}
        if rough:
            self._deeds |= {self._sleep: 0.02, self._crash: 0.01, self._kick: 0.02}
        self._asleep = False

    def act(self) -> None:
        if self._asleep:
            if self._random.random() < 0.1:
                self.wake()
            return
        for deed, chance in self._deeds.items():
            if not self._asleep and self._random.random() < chance:
                self._walk.counts[deed.__name__] += 1
                deed()

    def wake(self) -> None:
        if self._asleep:
            self._daemon.resume()
            self._asleep = False
            self._maybe_wait()

    def _sleep(self) -> None:
        self._daemon.pause()
        self._asleep = True

    def _crash(self) -> None:
        self._daemon.kill()
        self._daemon.start()
        self._maybe_wait()

    def _reset(self) -> None:
        self._walk.planner.reset()

    def _evict(self) -> None:
        keys = [key for key in self._walk.keys if self._random.random() < 0.03]
        if keys:
            with Client(self._daemon.address) as client:
                cache = client.open_cache(self._walk.planner.leader.name)
                cache.in_group(self._random.randrange(len(self._walk.layout.groups))).drop(keys)

    def _kick(self) -> None:
        with Client(self._daemon.address) as client:
            sessions = [each.session_id for each in client.stats().sessions if each.session_id != client.session_id]
            if sessions:
                client.kick(self._random.choice(sessions))
        self._maybe_wait()

    def _maybe_wait(self) -> None:
        """Half of the time the engine goes on while its clients find a new session."""
        if self._random.random() < 0.5:
            wait_until(lambda: self._walk.planner.leader.answers)


def recover(engine: Walk) -> None:
    """Whatever has happened, blocks are stored and loaded again soon."""
    for what in ("blocks saved", "blocks loaded"):
        before = engine.planner.stats().get(what, 0)

        def more(what: str = what, before: int = before) -> bool:
            engine.step()
            return engine.planner.stats().get(what, 0) > before

        wait_until(more)


def go(daemon: DaemonProcess, layout: Layout, seed: int, *, rough: bool, steps: int = STEPS, **settings: Any) -> None:
    with walk(daemon.address, layout, seed, **settings) as engine:
        world = World(daemon, engine, seed, rough=rough)
        try:
            for _ in range(steps):
                world.act()
                engine.step()
        finally:
            world.wake()
        recover(engine)
        engine.drain()
        assert not engine.left_in_planner
        assert engine.slowest[0] < STALL_S, engine.slowest
        with Client(daemon.address) as client:
            assert_right(client, engine, engine.keys)
    with Client(daemon.address) as client:
        wait_until(lambda: not client.leases())


def settings(layout: Layout, seed: int) -> dict[str, Any]:
    """Some walks have hardly any slots, some hold what they offer, some have several threads."""
    chances = random.Random(seed)
    slots = chances.choice([12, 60, 200]) if not layout.states else MANY_SLOTS
    slot_bytes = 4096 * max(-(-layout.spec.block_bytes(group) // 4096) + 2 for group in range(len(layout.groups)))
    return {
        "host_bytes": slots * len(layout.groups) * slot_bytes,
        "disk_bytes": 2 * slots * len(layout.groups) * slot_bytes,
        "reserve_blocks": chances.choice([1, 8, 64]),
        "threads": chances.choice([1, 3]),
        "async_blocks": chances.choice([0, 4, 16]),
        "pin": chances.random() < 0.3,
        "late": chances.choice([0.0, 0.2, 0.7]),
        "broken": chances.choice([0.0, 0.1, 0.5]),
        "unsaved": chances.choice([0.0, 0.1]),
    }


def daemon_for(start_daemon: Callable[..., DaemonProcess], layout: Layout) -> DaemonProcess:
    return start_daemon(host=512, disk=1024) if not layout.states else start_daemon(host=8192, disk=16_384)


def walks(daemon: DaemonProcess, layout: Layout, seed: int) -> None:
    go(daemon, layout, seed, rough=seed % 2 == 1, **settings(layout, seed))


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(2, 40))])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_page_is_right_or_named(start_daemon, layout, seed):
    walks(daemon_for(start_daemon, LAYOUTS[layout]), LAYOUTS[layout], seed)


class SavesWhatAFailedLoadSpoiled(Planner):
    def _distrust(self) -> None:
        pass


class KeepsOldTables(Planner):
    def scheduled(self, req_id: str, computed_tokens: int, new_tokens: int, tables: Any, **given: Any) -> None:
        copy = {group: list(table) for group, table in tables.items()}
        super().scheduled(req_id, computed_tokens, new_tokens, copy, **given)

    def finished(self, req_id: str, tables: Any = None, hints: Any = None) -> bool:
        return super().finished(req_id)


class SavesUnfinishedStates(Planner):
    def scheduled(self, req_id: str, computed_tokens: int, new_tokens: int, tables: Any, **given: Any) -> None:
        missing = -(computed_tokens + new_tokens) % TOKENS
        super().scheduled(req_id, computed_tokens, new_tokens + missing, tables, **given)


class BelievesOneRank(Planner):
    def completed(self, outcomes: Iterable[CopyResult]) -> Completed:
        return super().completed([replace(each, failed={} if each.rank else each.failed) for each in outcomes])


class WaitsForOneRank(Planner):
    def completed(self, outcomes: Iterable[CopyResult]) -> Completed:
        return super().completed([replace(each, rank=rank) for each in outcomes for rank in range(self.layout.ranks)])


class ForgetsToFlush(FaultyMover):
    def flush(self, pages: Any = None, **given: Any) -> None:
        pass


class ReadsPagesThatWereGivenUp(FaultyMover):
    def _save(self, save: Any, rows: Any, copying: Any) -> None:
        super()._save(save, rows, replace(copying, turn=threading.Lock()))


class DoesNotWaitForLoads(FaultyMover):
    def wait_loads(self, timeout: float | None = None) -> None:
        pass


class SavesBeforeThePass(FaultyMover):
    def start(self, work: Work, **given: Any) -> None:
        super().start(work, **given)
        self.save()


NO_SLOTS: Final = {"reserve_blocks": 1, "host_bytes": 1 << 18, "disk_bytes": 1 << 19}
FAULTS: Final = [
    (HYBRID, SavesWhatAFailedLoadSpoiled, {"broken": 0.7, "unsaved": 0.0, "async_blocks": 1000}),
    (HYBRID, KeepsOldTables, NO_SLOTS),
    (STATES, SavesUnfinishedStates, {"host_bytes": 64 << 20, "disk_bytes": 128 << 20}),
    (RANKS, BelievesOneRank, {"broken": 0.3}),
    (RANKS, WaitsForOneRank, {}),
    (HYBRID, ForgetsToFlush, {}),
    (HYBRID, ReadsPagesThatWereGivenUp, {}),
    (PLAIN, DoesNotWaitForLoads, {}),
    (PLAIN, SavesBeforeThePass, {}),
]


@pytest.mark.long
@pytest.mark.parametrize(
    ("layout", "fault", "given"), [pytest.param(*each, id=str(each[1].__name__)) for each in FAULTS]
)
def test_a_planted_fault_is_found(start_daemon, layout, fault, given):
    daemon = daemon_for(start_daemon, layout)
    planted = {"planner" if issubclass(fault, Planner) else "mover": fault}
    for seed in range(20):
        plenty = {"host_bytes": None, "disk_bytes": None, "pin": False, "late": 0.3}
        try:
            go(daemon, layout, seed, rough=False, **(settings(layout, seed) | plenty | given | planted))
        except AssertionError:
            return
    pytest.fail("no walk has found it")
