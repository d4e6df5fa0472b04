"""Integer ids, each a type of its own, and the tiers.

Mixing up a slot, a block and an event number is this field's classic bug, so none of them is a bare ``int``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple, NewType, TypeVar, cast

from kvtier.abi.words import BITS as BITS  # noqa: PLC0414  others take it from here
from kvtier.abi.words import TIERS as TIERS  # noqa: PLC0414
from kvtier.abi.words import Tier as Tier  # noqa: PLC0414  others take it from here

CacheId = NewType("CacheId", int)
GroupId = NewType("GroupId", int)
SlotId = NewType("SlotId", int)
LeaseId = NewType("LeaseId", int)
SessionId = NewType("SessionId", int)
TicketId = NewType("TicketId", int)
MoveId = NewType("MoveId", int)
EventId = NewType("EventId", int)

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
"""The same. To look a member up in its class takes ten times as long as a global (Python 3.11), and the core does so
dozens of times a block: hence such names beside its enumerations."""

EVENT_HASH_BYTES: Final = (0, 8, 32)
"""Lengths that an event hash may have: none, 64 bits, a digest."""

TOKEN_BYTES: Final = 4
MAX_TOKEN_BYTES: Final = 1 << 16
CHECKSUM_BYTES: Final = 16


@dataclass(slots=True, frozen=True)
class Label:
    """How others know the block.

    ``event_hash``: the name that events give it besides its key. ``tokens``: its token ids, ``TOKEN_BYTES`` each.
    ``checksum``: of its bytes when it was committed, ``CHECKSUM_BYTES``. ``scope``: what besides the token ids decides
    its bytes, packed, opaque. Tokens and scope are at most ``MAX_TOKEN_BYTES``.
    """

    event_hash: bytes = b""
    tokens: bytes = b""
    checksum: bytes = b""
    scope: bytes = b""


NO_LABEL: Final = Label()


class Traits(NamedTuple):
    """A tuple, because a restart makes one for every block on disk.

    ``priority``: the block's own. ``duration_ms``: how long it holds after the last release; 0 = for ever.
    ``deadline_ns``: the wall time at which it falls; 0 where its clock stands. ``label``: None for a block without any
    of them, which costs nothing.
    """

    priority: int
    duration_ms: int = 0
    deadline_ns: int = 0
    label: Label | None = None


_PLAIN: Final = tuple(Traits(priority) for priority in range(101))


def traits_of(priority: int, duration_ms: int, label: Label | None) -> Traits:
    """Of a block whose clock stands."""
    if duration_ms or label is not None or not 0 <= priority < len(_PLAIN):
        return Traits(priority, duration_ms, 0, label)
    return _PLAIN[priority]


def shared(traits: Traits) -> Traits:
    """The same, as one object for all blocks that have nothing but a priority: most have no more."""
    priority, duration_ms, deadline_ns, label = traits
    if duration_ms or deadline_ns or label is not None or not 0 <= priority < len(_PLAIN):
        return traits
    return _PLAIN[priority]


Row = TypeVar("Row", bound=tuple[Any, ...])


def rows(kind: type[Row], *columns: Iterable[object]) -> Iterator[Row]:
    """A ``kind`` of each place in the columns, one a field in their order, until the shortest of them ends: three times
    as quick as to call the class. Nobody checks that the fields are all there."""
    return map(cast("partial[Row]", partial(tuple.__new__, kind)), zip(*columns, strict=False))
