"""Integer ids, each with a type of its own, and the tiers.

No id is a bare ``int``, so the type checker finds a slot, a block and an event number that are mixed up.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple, NewType, TypeVar, cast

from kvtier.abi.words import BITS as BITS  # noqa: PLC0414  re-exported
from kvtier.abi.words import TIERS as TIERS  # noqa: PLC0414
from kvtier.abi.words import Tier as Tier  # noqa: PLC0414  re-exported

CacheId = NewType("CacheId", int)
GroupId = NewType("GroupId", int)
SlotId = NewType("SlotId", int)
LeaseId = NewType("LeaseId", int)
SessionId = NewType("SessionId", int)
TicketId = NewType("TicketId", int)
MoveId = NewType("MoveId", int)
EventId = NewType("EventId", int)

NOBODY: Final = SessionId(0)
SEVERAL: Final = SessionId((1 << 64) - 1)
"""Owner of a blank slot that several sessions hold. No session has this number."""

DAEMON: Final = SessionId((1 << 64) - 2)
"""Owner of slots that the daemon itself fills. No session has this number either."""

Key = NewType("Key", bytes)
"""A block key: exactly ``KEY_BYTES`` bytes."""

KEY_BYTES: Final = 32

DEVICE: Final = Tier.DEVICE
HOST: Final = Tier.HOST
DISK: Final = Tier.DISK
REMOTE: Final = Tier.REMOTE
"""Globals for the tiers. Python 3.11 looks a global up faster than a member of an enumeration, and the core does so
dozens of times a block. The core's other enumerations have globals too."""

EVENT_HASH_BYTES: Final = (0, 8, 32)
"""Allowed lengths of an event hash: none, 64 bits, a digest."""

TOKEN_BYTES: Final = 4
MAX_TOKEN_BYTES: Final = 1 << 16
CHECKSUM_BYTES: Final = 16


@dataclass(slots=True, frozen=True)
class Label:
    """Optional description of a block for other programs.

    ``event_hash``: the block's name in events, besides its key. ``tokens``: its token ids, ``TOKEN_BYTES`` each.
    ``checksum``: of its bytes at commit, ``CHECKSUM_BYTES``. ``scope``: all else that decides its bytes, packed,
    opaque. Tokens and scope have at most ``MAX_TOKEN_BYTES`` each.
    """

    event_hash: bytes = b""
    tokens: bytes = b""
    checksum: bytes = b""
    scope: bytes = b""


NO_LABEL: Final = Label()


class Traits(NamedTuple):
    """Retention and label of a block. A tuple, because a restart makes one for every block on disk.

    ``priority``: the block's own. ``duration_ms``: how long the priority holds after the last release; 0 = for ever.
    ``deadline_ns``: the wall time at which the priority ends; 0 while the clock is stopped. ``label``: None if all its
    fields would be empty, which costs nothing.
    """

    priority: int
    duration_ms: int = 0
    deadline_ns: int = 0
    label: Label | None = None


_PLAIN: Final = tuple(Traits(priority) for priority in range(101))


def shared(traits: Traits) -> Traits:
    """Returns equal traits. Blocks with nothing but a priority share one object a priority; most blocks have no
    more."""
    priority, duration_ms, deadline_ns, label = traits
    if duration_ms or deadline_ns or label is not None or not 0 <= priority < len(_PLAIN):
        return traits
    return _PLAIN[priority]


Row = TypeVar("Row", bound=tuple[Any, ...])


def rows(kind: type[Row], *columns: Iterable[object]) -> Iterator[Row]:
    """Yields a ``kind`` for each place in the columns, one column a field, in field order, until the shortest column
    ends.

    Much faster than calling the class. A missing column goes unnoticed.
    """
    return map(cast("partial[Row]", partial(tuple.__new__, kind)), zip(*columns, strict=False))
