"""The contract of a tier: the slots of a memory tier, and the errors of all tiers.

The class of an error tells its cause: the configuration, the hardware, or a directory that is not kvtier's to touch.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvtierd.core.ids import GroupId, SlotId

Bytes = NDArray[np.uint8]
"""A view of raw bytes."""


class MemoryStore(Protocol):
    """Slots of one tier that are memory of this process.

    A slot holds one block: a part in each pool of its window group. Views stay valid while they are referenced, even
    after :meth:`close`. Every method raises IndexError for a slot that does not exist.
    """

    def parts(self, group: GroupId, slot: SlotId) -> Sequence[Bytes]:
        """The exact bytes of a slot: a 1-D array per pool, without padding."""

    def padded_parts(self, group: GroupId, slot: SlotId) -> Sequence[memoryview]:
        """The bytes of a slot as the disk stores them.

        Returns:
            The record in pool order, in one view or several. Address and length of each view are multiples of 4096, as
            direct I/O needs them.
        """

    def pool_array(self, group: GroupId, pool: int) -> Bytes:
        """The exact bytes of all slots in one pool. Returns [slots, bytes]. A single copy can move the rows of
        consecutive slots."""

    def close(self) -> None:
        """Releases the memory. No call may follow."""


class TierError(Exception):
    """A tier cannot perform a request."""


class TierConfigError(TierError):
    """The configuration, or a request, asks for something impossible. ``field``: "" = ``limit`` is the message."""

    def __init__(self, field: str, value: object, limit: str) -> None:
        super().__init__(f"{field} = {value}: {limit}" if field else limit)
        self.field = field
        self.value = value
        self.limit = limit


class NoDeviceMemory(TierConfigError):
    """The GPU has too little free memory for a cache."""


class TierIOError(TierError):
    """The medium failed. ``errno``: the system's; 0 = none."""

    def __init__(self, errno: int, message: str) -> None:
        super().__init__(message)
        self.errno = errno


class DeviceIOError(TierIOError):
    """The GPU failed."""

    def __init__(self, message: str) -> None:
        super().__init__(0, message)


class GpuUnavailable(DeviceIOError):
    """The GPU cannot be opened. ``uuid``: in the driver's list; None = not listed. ``broken``: the driver says that the
    device has failed; else its name may be wrong."""

    def __init__(self, message: str, uuid: str | None, *, broken: bool) -> None:
        super().__init__(message)
        self.uuid = uuid
        self.broken = broken


class NotAdoptable(TierError):
    """Memory of an earlier daemon does not fit this daemon. The memory was not touched."""


class ForeignDirectory(TierError):
    """The directory holds files that kvtier did not make. Nothing in it was touched."""

    def __init__(self, path: Path, message: str) -> None:
        super().__init__(f"{path}: {message}")


class DamagedDirectory(TierError):
    """The directory is kvtier's but cannot be trusted. Nothing in it was touched."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(f"{path}: {why}")
        self.why = why


class LockedDirectory(TierError):
    """Another daemon has the directory. ``pid`` is its process, 0 if it could not be read."""

    def __init__(self, path: Path, pid: int) -> None:
        super().__init__(f"{path}: in use by process {pid or 'unknown'}")
        self.pid = pid
