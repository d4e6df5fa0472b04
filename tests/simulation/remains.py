"""The memory and its users after a daemon's end, which the next daemon adopts."""

from collections.abc import Callable, Iterable, Mapping

from kvtierd.core.ids import GroupId, SessionId, SlotId, Tier
from kvtierd.tiers.disk.records import SlotContents
from tests.simulation.memory import Memory


class Died(Exception):
    """The daemon died in the middle of a call's outcome."""


class Lifetime:
    """Counts the stores to memory that the daemon still makes. It may die between any two stores of a machine word."""

    def __init__(self) -> None:
        self._left: int | None = None

    def ends_after(self, stores: int | None) -> None:
        """Sets the number of stores left. None: no limit."""
        self._left = stores

    def store(self) -> None:
        """Call before each store. Raises :class:`Died`."""
        if self._left is None:
            return
        if self._left == 0:
            self._left = None
            raise Died
        self._left -= 1


class Remains:
    """The memories of all groups, with the interface of an arena for ``kvtierd.service.recovery``."""

    def __init__(self, memories: Mapping[GroupId, Mapping[Tier, Memory]], store: Callable[[], None]) -> None:
        self._memories = memories
        self._store = store

    @property
    def tiers(self) -> tuple[Tier, ...]:
        return tuple(sorted(next(iter(self._memories.values()))))

    def generation(self, tier: Tier, group: GroupId, slot: SlotId) -> int:
        return self._memories[group][tier].generations[slot]

    def contents(self, tier: Tier, group: GroupId) -> SlotContents:
        return self._memories[group][tier].found()

    def ready_slots(self, tier: Tier, group: GroupId) -> list[SlotId]:
        memory = self._memories[group][tier]
        return [slot for slot in map(SlotId, range(len(memory.generations))) if memory.ready(slot)]

    def owned(self, tier: Tier, group: GroupId) -> dict[SlotId, SessionId]:
        owners = enumerate(self._memories[group][tier].owners)
        return {SlotId(slot): session for slot, session in owners if session is not None}

    def set_owners(self, tier: Tier, group: GroupId, owners: Mapping[SlotId, SessionId | None]) -> None:
        for slot, session in owners.items():
            self._store()
            self._memories[group][tier].owners[slot] = session

    def begin_writes(self, tier: Tier, group: GroupId, slots: Iterable[SlotId]) -> None:
        for slot in slots:
            self._store()
            self._memories[group][tier].invalidate(slot)
