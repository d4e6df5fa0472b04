"""The contract of a store beyond this host: named, immutable objects.

A store has no slots and no index of its own here. Objects may vanish at any time, and other hosts write there, too:
``objects.py`` makes what is read prove itself.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

ABSENT: Final = -1
FAILED: Final = -2
"""The store has the object, maybe, and does not give it: archived, another account's, its key gone."""
UNANSWERED: Final = -3
"""The store did not answer for this object."""
CHECKSUM_BYTES: Final = 16
"""Bytes at the beginning of an object that tell it from others of its name."""


@dataclass(slots=True, frozen=True)
class Listed:
    """An object of a listing. ``modified_s``: seconds since 1970."""

    name: str
    nbytes: int
    modified_s: float


class RemoteStore(Protocol):
    """Objects of one byte or more, by name; a name is ASCII, of at most 512 bytes, with ``/`` between its parts. A call
    has no name twice.

    Loop thread only. Every call may be cancelled, and its caller bounds its time; buffers to read into are not touched
    once it has ended. Each raises :class:`RemoteUnavailable`, :class:`RemoteRefused` or :class:`RemoteFull`, and no
    other error. ``replaces``: a put replaces an object that exists, otherwise that object stays.
    """

    @property
    def replaces(self) -> bool: ...

    async def exists(self, names: Sequence[str]) -> Sequence[bool]:
        """Whether each object is there. False for an object that the store does not answer for; raises if there is no
        answer for any."""
        ...

    async def get(self, names: Sequence[str], into: Sequence[memoryview]) -> Sequence[int]:
        """Reads objects side by side.

        Args:
            into: a writable buffer of bytes a name.

        Returns:
            The bytes of each object; else ``ABSENT``, ``FAILED`` or ``UNANSWERED``. An object longer than its buffer
            is not read. Raises if no object can be read.
        """
        ...

    async def begins(self, names: Sequence[str], nbytes: int) -> Sequence[bytes]:
        """The first ``nbytes`` of each object. Nothing of an object that the store does not have or give; raises if it
        does not answer for any."""
        ...

    async def put(self, names: Sequence[str], objects: Sequence[bytes]) -> Sequence[RemoteError | None]:
        """Writes objects side by side, perhaps on after a cancelled call. Readers see all of an object or
        nothing. Returns why each was not written; raises if none was, or there is no room."""
        ...

    async def delete(self, names: Sequence[str]) -> None:
        """Deletes objects; one that is not there is no error."""
        ...

    def listing(self, prefix: str) -> AsyncIterator[Listed]:
        """The objects whose names begin with ``prefix``, in any order. Raises :class:`RemoteRefused` where a store
        cannot list."""
        ...

    async def close(self) -> None:
        """Ends its connections. No call follows."""
        ...


class RemoteError(Exception):
    """A call of a store failed. No message has a credential in it. ``of_object``: the store answered, so it may
    be one object's fault."""

    def __init__(self, message: str | None, *, of_object: bool = False) -> None:
        super().__init__(message)
        self.of_object: Final = of_object


class RemoteUnavailable(RemoteError):
    """It does not answer, is overloaded or failed: it may work again by itself."""


class RemoteRefused(RemoteError):
    """It answers and will not: credentials, rights, a bucket that is not there. An operator can mend it."""


class RemoteFull(RemoteError):
    """It has no room."""
