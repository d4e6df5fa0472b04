"""Any sequence of calls, damage and restarts, against a dictionary."""

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvtierd.core.ids import SlotId
from tests.unit.disk.disk_blocks import GROUP, SHAPE_BYTES, block, key, names, new_store, open_store, verdicts

SLOTS = 8
NAMES = range(12)
"""Few, so that blocks come back, in other slots and under other parents."""

SOME_NAMES = st.lists(st.sampled_from(NAMES), max_size=5, unique=True)


@dataclass
class Held:
    slot: int
    parent: int | None
    used: int
    damaged: bool = False


class DiskModel(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(prefix="kvtier-model-"))
        self.store = new_store(self.directory, SLOTS)
        self.held: dict[int, Held] = {}
        self.condemned: set[int] = set()
        self.clock = 0

    def teardown(self) -> None:
        self.store.close()
        shutil.rmtree(self.directory)

    def tick(self) -> int:
        self.clock += 1
        return self.clock

    @rule(
        puts=st.lists(
            st.tuples(st.sampled_from(NAMES), st.integers(0, SLOTS - 1), st.none() | st.sampled_from(NAMES)), max_size=5
        ),
        retired=SOME_NAMES,
        touched=st.lists(st.sampled_from(NAMES), max_size=5),
    )
    def write(self, puts: list[tuple[int, int, int | None]], retired: list[int], touched: list[int]) -> None:
        """What of it is allowed: one write a slot and a name, free slots, and retired are leaves that get no child."""
        free = set(range(SLOTS)) - {held.slot for held in self.held.values()}
        chosen: dict[int, tuple[int, int | None]] = {}
        for name, slot, parent in puts:
            if slot in free and name not in self.held and name not in chosen and name != parent:
                chosen[name] = (slot, parent)
                free.discard(slot)
        parents = {held.parent for held in self.held.values()} | {parent for _, parent in chosen.values()}
        leaving = [name for name in retired if name in self.held and name not in parents]

        stored: set[int] = set()
        while reachable := {
            name
            for name, (_, parent) in chosen.items()
            if name not in stored and (parent is None or parent in stored or parent in self.held)
        }:
            stored |= reachable
        failed = self.store.write(
            [block(name, slot, parent) for name, (slot, parent) in chosen.items()],
            [(GROUP, key(name), SlotId(self.held[name].slot)) for name in leaving],
            [(GROUP, b"".join(key(name) for name in touched))],
        )
        assert {name for number, name in enumerate(chosen) if number not in failed} == stored

        for name in leaving:
            del self.held[name]
        for name, (slot, parent) in chosen.items():
            if name in stored:
                self.held[name] = Held(slot, parent, self.tick())
                self.condemned.discard(slot)
        for name in touched:
            if name in self.held:
                self.held[name].used = self.tick()

    @rule(name=st.sampled_from(NAMES), slot=st.integers(0, SLOTS - 1))
    def retire_where_it_is_not(self, name: int, slot: int) -> None:
        if name not in self.held or self.held[name].slot != slot:
            self.store.write([], [(GROUP, key(name), SlotId(slot))])

    @rule(name=st.sampled_from(NAMES), offset=st.integers(0, SHAPE_BYTES - 1))
    def damage(self, name: int, offset: int) -> None:
        if name in self.held and not self.held[name].damaged:
            with open(self.directory / "group-0.slab", "r+b") as file:
                file.seek(self.held[name].slot * SHAPE_BYTES + offset)
                byte = file.read(1)[0]
                file.seek(-1, 1)
                file.write(bytes([byte ^ 1]))
            self.held[name].damaged = True

    @rule(asked=SOME_NAMES, slot=st.integers(0, SLOTS - 1))
    def read(self, asked: list[int], slot: int) -> None:
        found = verdicts(self.store, {name: self.held[name].slot if name in self.held else slot for name in asked})
        for name, verdict in found.items():
            right = name in self.held and not self.held[name].damaged
            assert verdict == ("ok" if right else "corrupt")
            if name in self.held and not right:
                self.condemned.add(self.held[name].slot)

    @rule()
    def reopen(self) -> None:
        self.store.close()
        self.store = open_store(self.directory, SLOTS)
        recovery = self.store.recover()
        assert recovery.quarantined == {GROUP: self.condemned}
        waiting = {name: held for name, held in self.held.items() if held.slot not in self.condemned}
        kept: dict[int, Held] = {}
        while free := [name for name, held in waiting.items() if held.parent is None or held.parent in kept]:
            first = min(free, key=lambda name: waiting[name].used)
            kept[first] = waiting.pop(first)
        assert names(recovery, NAMES) == list(kept)
        assert recovery.dropped == len(self.held) - len(kept)
        for record, (name, held) in zip(recovery.records[GROUP], kept.items(), strict=True):
            above = None if held.parent is None else key(held.parent)
            assert record[:3] == (held.slot, key(name), above)
        self.held = kept

    @invariant()
    def everything_undamaged_is_there(self) -> None:
        sound = {name: held.slot for name, held in self.held.items() if not held.damaged}
        assert verdicts(self.store, sound) == dict.fromkeys(sound, "ok")


TestDiskModel = DiskModel.TestCase
TestDiskModel.settings = settings(
    max_examples=40, stateful_step_count=25, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
