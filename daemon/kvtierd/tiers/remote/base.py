"""The contract of a remote store: named, immutable objects.

A store has no slots and no index here. Objects may vanish at any time, and other hosts write to the store, too.
``objects.py`` verifies every object.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

ABSENT: Final = -1
FAILED: Final = -2
"""The store may have the object, but does not give it: archived, another account's, or its key is gone."""
UNANSWERED: Final = -3
"""The store did not answer for this object."""
CHECKSUM_BYTES: Final = 16
"""Bytes at the beginning of an object that differ between objects of the same name."""


@dataclass(slots=True, frozen=True)
class Listed:
    """An object of a listing. ``modified_s``: seconds since 1970."""

    name: str
    nbytes: int
    modified_s: float


class RemoteStore(Protocol):
    """Objects of one byte or more, by name; a name is ASCII, of at most 512 bytes, with ``/`` between its parts. A call
    has no name twice.

    Loop thread only. Every call may be cancelled, and its caller limits its time. A call that has ended does not touch
    its buffers any more. Calls raise only :class:`RemoteUnavailable`, :class:`RemoteRefused` and :class:`RemoteFull`.
    ``replaces``: a put replaces an existing object; otherwise the existing object stays.
    """

    @property
    def replaces(self) -> bool: ...

    async def exists(self, names: Sequence[str]) -> Sequence[bool]:
        """Whether each object is in the store. False without an answer for the object; raises without an answer for
        any object."""

    async def get(self, names: Sequence[str], into: Sequence[memoryview]) -> Sequence[int]:
        """Reads objects in parallel.

        Args:
            into: a writable buffer per name.

        Returns:
            The bytes of each object; else ``ABSENT``, ``FAILED`` or ``UNANSWERED``. An object longer than its buffer
            is not read. Raises if no object can be read.
        """

    async def begins(self, names: Sequence[str], nbytes: int) -> Sequence[bytes]:
        """The first ``nbytes`` of each object; empty for an object that the store does not have or give. Raises without
        an answer for any object."""

    async def put(self, names: Sequence[str], objects: Sequence[bytes]) -> Sequence[RemoteError | None]:
        """Writes objects in parallel; a cancelled call may still write. Readers see all of an object or nothing.
        Returns the error of each object; raises if none was written, or the store is full."""

    async def delete(self, names: Sequence[str]) -> None:
        """Deletes objects. A missing object is not an error."""

    def listing(self, prefix: str) -> AsyncIterator[Listed]:
        """The objects whose names begin with ``prefix``, in any order. Raises :class:`RemoteRefused` if the store
        cannot list."""

    async def close(self) -> None:
        """Closes the connections. No call may follow."""


class RemoteError(Exception):
    """A call of a store failed. Messages have no credentials. ``of_object``: the store answered, so the fault may be
    a single object's."""

    def __init__(self, message: str | None, *, of_object: bool = False) -> None:
        super().__init__(message)
        self.of_object: Final = of_object


class RemoteUnavailable(RemoteError):
    """The store does not answer, is overloaded or has failed, but may work again by itself."""


class RemoteRefused(RemoteError):
    """The store refuses the call: credentials, rights, or a missing bucket. An operator can fix it."""


class RemoteFull(RemoteError):
    """The store is full."""
