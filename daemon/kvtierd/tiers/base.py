"""What every tier offers and how it fails.

Errors are split by whose problem they are: the operator's configuration, the hardware, or a directory that is not ours
to touch.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from kvtierd.core.ids import GroupId, SlotId, Tier

if TYPE_CHECKING:
    from kvtierd.tiers.parts import Part  # which raises this module's errors

Bytes = NDArray[np.uint8]
"""A view of raw bytes."""


class MemoryStore(Protocol):
    """Slots that are memory. Views stay valid while anyone holds them, even past :meth:`close`."""

    @property
    def tier(self) -> Tier: ...

    def parts(self, group: GroupId, slot: SlotId) -> Sequence[Bytes]:
        """The slot's exact bytes: one 1-D array a pool."""
        ...

    def padded_parts(self, group: GroupId, slot: SlotId) -> Sequence[Part]:
        """The same with padding, in the order of the disk's record, in as many parts as it takes: address and length of
        each are multiples of 4096, fit for direct I/O."""
        ...

    def pool_array(self, group: GroupId, pool: int) -> Bytes:
        """All slots' exact bytes in one pool: [slots, bytes]. Rows of consecutive slots can be copied as one piece."""
        ...

    def poison(self, group: GroupId, slot: SlotId) -> None:
        """Overwrites the first and last 4096 bytes of each part, so that nobody mistakes a freed slot for data."""
        ...

    def close(self) -> None: ...


class TierError(Exception):
    """A tier cannot do what was asked."""


class TierConfigError(TierError):
    """What the configuration asks for cannot be had: ``field``, ``value``, ``limit``."""

    def __init__(self, field: str, value: object, limit: str) -> None:
        super().__init__(f"{field} = {value}: {limit}")
        self.field = field
        self.value = value
        self.limit = limit


class NoDeviceMemory(TierConfigError):
    """The GPU has too little memory free for a cache."""


class TierIOError(TierError):
    """The medium failed. ``errno`` is the system's, 0 where it gave none."""

    def __init__(self, errno: int, message: str) -> None:
        super().__init__(message)
        self.errno = errno


class DeviceIOError(TierIOError):
    """The GPU failed."""

    def __init__(self, message: str) -> None:
        super().__init__(0, message)


class NotAdoptable(TierError):
    """Shared memory of an earlier daemon that cannot be trusted, or is not what is wanted. It was not touched."""


class ForeignDirectory(TierError):
    """The directory holds something that kvtier did not make. Nothing in it was touched."""

    def __init__(self, path: Path, message: str) -> None:
        super().__init__(f"{path}: {message}")
        self.path = path


class DamagedDirectory(TierError):
    """The directory is kvtier's but cannot be trusted. Nothing in it was touched."""

    def __init__(self, path: Path, message: str) -> None:
        super().__init__(f"{path}: {message}")
        self.path = path


class LockedDirectory(TierError):
    """Another daemon has the directory. ``pid`` is its process, 0 if it could not be read."""

    def __init__(self, path: Path, pid: int) -> None:
        super().__init__(f"{path}: in use by process {pid or 'unknown'}")
        self.path = path
        self.pid = pid
