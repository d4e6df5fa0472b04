"""The enumerations and lengths of the wire: tiers, causes, event types, results. Values are the wire's unless noted.

Imports no numpy, unlike the modules that compute with keys."""

from __future__ import annotations

from enum import IntEnum
from typing import Final

KEY_BYTES: Final = 32
ROOT_PARENT: Final = bytes(KEY_BYTES)
"""The parent of a chain's first block on the wire."""
DIGEST_BYTES: Final = 32
ENDED_MS: Final = (1 << 32) - 1
"""The duration of a block that a hint has ended: until a request finds it. No client can set it."""

BITS: Final[tuple[int, ...]] = (1, 2, 4, 8)
_NAMES: Final[tuple[str, ...]] = ("device", "host", "disk", "remote")


class Tier(IntEnum):
    """Tiers, the fastest first. The value is TensorRT-LLM's cache level, one less than the wire's."""

    DEVICE = 0
    HOST = 1
    DISK = 2
    REMOTE = 3
    """A remote store. No residency set contains it, since its contents are known only by asking."""

    @property
    def bit(self) -> int:
        """This tier's bit in a residency set (1 device, 2 host, 4 disk)."""
        return BITS[self]

    def __str__(self) -> str:
        return _NAMES[self]

    __hash__ = int.__hash__
    """Faster than the hash of an enum, which is a Python call: tiers are in the keys of hot tables."""


TIERS: Final = (Tier.DEVICE, Tier.HOST, Tier.DISK)
"""The tiers of a host, which have slots."""


class _Word(IntEnum):
    def __str__(self) -> str:
        return self.name.lower()


class Cause(_Word):
    """The cause of a change of residency, priority or existence."""

    COMMIT = 1
    WRITE_THROUGH = 2
    CAPACITY = 3
    WATERMARK = 4
    QUOTA = 5
    EXPIRED = 6
    DEMAND = 7
    PREFETCH = 8
    EXPLICIT = 9
    RESET = 10
    CORRUPT = 11
    IO_ERROR = 12
    ANCESTOR = 13
    LOST = 14
    SHUTDOWN = 15
    RECOVERED = 16
    REMOTE = 17
    """A block went to, or came from, a remote store."""
    HINT = 18


class EventType(_Word):
    """The type of an event. ``str()`` gives TensorRT-LLM's name for it."""

    CREATED = 1
    STORED = 2
    REMOVED = 3
    UPDATED = 4
    CLEARED = 5


class BlockResult(_Word):
    """The result for one block in a call that was accepted as a whole."""

    OK = 0
    EXISTS = 1
    """commit: an equal key is indexed; the old block was kept, the new slot freed."""
    PARENT_MISSING = 2
    """commit: the parent is not indexed, or is a partial block; the slot stays blank and leased."""
    NOT_FOUND = 3
    """move, drop: the key is not indexed."""
    HELD = 4
    """drop: the block, or a block below it, is leased or pinned."""
    NO_ROOM = 5
    """move: the tier could not make room, or not before the deadline; a copy that has begun goes on."""
    FAILED = 6
    """move: the copy failed; the source is as it was."""
    PARENT_CONFLICT = 7
    """commit: an equal key is indexed under another parent; the slot stays blank and leased."""
    NOT_READY = 8
    """pin: the block has no READY copy in the tier."""
    OVER_CAP = 9
    """pin: too many slots of the tier are pinned."""
    NOT_PINNED = 10
    """unpin: the block has no pin in the tier."""
