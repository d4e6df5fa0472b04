"""Which batches under way touch which slots, and for whom another one has to wait.

The core never plans a slot that a move touches again before it has been told of that move's end, and who reads or
writes a slot for a client holds a lease on it. So no batch should ever have to wait here. This table is the proof of
that at the edge of the hardware: should anybody above err, one stream waits for the other, and bytes are not mixed up.

It has an entry a batch, not a slot: there are a handful of batches under way at a time, and whether two of them share a
slot is one set operation.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final, NewType

from kvtier.abi.cuda.driver import Event, Stream
from kvtierd.core.ids import GroupId, SlotId, Tier

Spot = NewType("Spot", int)
"""A tier-qualified slot."""

_TIERS: Final = 2
"""Bits of a spot for the tier."""
_GROUPS: Final = 8


def spot(tier: Tier, group: GroupId, slot: SlotId) -> Spot:
    return Spot((slot << _GROUPS | group) << _TIERS | tier)


@dataclass(slots=True, eq=False)
class Passage:
    """A batch from its first copy's issue until nothing of it runs any more. ``event`` says that, once it is recorded.

    ``recorded`` is set when it is, or when it never will be. ``fault``: why not all of it was issued.
    """

    stream: Stream
    event: Event
    reads: frozenset[Spot]
    writes: frozenset[Spot]
    recorded: threading.Event = field(default_factory=threading.Event)
    fault: Exception | None = None

    def clashes(self, other: Passage) -> bool:
        """Whether the order of the two matters: read after write, write after read, write after write."""
        return not (
            self.writes.isdisjoint(other.writes)
            and self.writes.isdisjoint(other.reads)
            and self.reads.isdisjoint(other.writes)
        )


class Hazards:
    """Any thread. Passages of one stream are entered in the order in which they are issued to it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._under_way: dict[Passage, None] = {}

    def __len__(self) -> int:
        """Batches under way."""
        return len(self._under_way)

    def enter(self, passage: Passage) -> list[Passage]:
        """A batch is about to be issued. Those that it has to wait for: what runs in its own stream is ordered."""
        with self._lock:
            clashing = [other for other in self._under_way if other.stream != passage.stream and other.clashes(passage)]
            self._under_way[passage] = None
        return clashing

    def order(self, after: Iterable[Passage], wait: Callable[[Event], None]) -> None:
        """Has ``wait`` called for the event of each of these that is still under way.

        It waits until their events are recorded: before that there is nothing to wait for. No circle comes of it, since
        each waits only for what was entered before. Nobody's event goes back to the pool during ``wait``.
        """
        for passage in after:
            passage.recorded.wait()
            with self._lock:
                if passage in self._under_way:
                    wait(passage.event)

    def leave(self, passage: Passage) -> None:
        """Nothing of it runs any more."""
        with self._lock:
            del self._under_way[passage]
