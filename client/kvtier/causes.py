"""What the causes of events mean, in one place for whoever shows them to people."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from kvtier.types import Cause


@dataclass(slots=True, frozen=True)
class Meaning:
    """``change``: what happened where a block was stored or updated. ``gone``: why a block is gone whose last event,
    ``removed`` or ``cleared``, had this cause. Empty where the cause is never said of such an event."""

    change: str = ""
    gone: str = ""


MEANINGS: Final[Mapping[Cause, Meaning]] = {
    Cause.COMMIT: Meaning("a client stored it, or a block under it that raises its priority"),
    Cause.WRITE_THROUGH: Meaning("copied down so that a lower tier is complete"),
    Cause.CAPACITY: Meaning(
        "room was made in a tier: it was the next in the order of eviction",
        "Room was needed: it was the next in the order of eviction, and no tier below it could or should take it.",
    ),
    Cause.WATERMARK: Meaning("copied down ahead of need, so that its slot can be reused without a copy"),
    Cause.QUOTA: Meaning(),
    Cause.EXPIRED: Meaning(
        "its retention ended: its priority is the default again",
    ),
    Cause.DEMAND: Meaning("a client acquired it: it was brought up, or got the retention that came with the call"),
    Cause.PREFETCH: Meaning("a call asked for it in a faster tier ahead of need"),
    Cause.EXPLICIT: Meaning(
        "by call: a demotion, a new retention, or a drop of what was under it",
        "It was dropped by call, or its cache was removed.",
    ),
    Cause.RESET: Meaning("blocks under it went with a reset", "Its cache was reset."),
    Cause.CORRUPT: Meaning(
        "its bytes in a tier failed verification, and that copy was given up",
        "Its bytes failed verification, and there was no other copy: it was given up rather than served.",
    ),
    Cause.IO_ERROR: Meaning(
        "a tier failed for longer than the grace period, and the copies there were given up",
        "The tier that it was in failed for longer than the grace period, and there was no other copy.",
    ),
    Cause.ANCESTOR: Meaning(
        "the copy of a block that it stands on was lost, and its own in that tier went with it",
        "A block that it stands on was dropped or lost; without that nobody could reach it.",
    ),
    Cause.LOST: Meaning(gone="It was lost with the memory of a daemon that ended uncleanly."),
    Cause.SHUTDOWN: Meaning(gone="The daemon was stopped, and the block was only in memory that ended with it."),
    Cause.RECOVERED: Meaning("found again at a start: on disk, or in memory that was kept"),
}
"""Every cause there is."""


def change_of(cause: Cause | int) -> str:
    """In words; a cause that this client does not know by its number."""
    meaning = MEANINGS.get(Cause(cause)) if cause in MEANINGS else None
    return meaning.change if meaning is not None else f"cause {cause}, which this client does not know"


def why_gone(cause: Cause | int) -> str:
    """A sentence for a block whose last event had this cause."""
    meaning = MEANINGS.get(Cause(cause)) if cause in MEANINGS else None
    return (meaning.gone if meaning is not None else "") or f"Cause {cause}: this client has no words for it."
