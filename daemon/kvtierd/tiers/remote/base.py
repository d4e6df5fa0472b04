"""The contract of a store beyond this host: named, immutable objects.

A store has no slots and no index of its own here. Objects may vanish at any time, and other hosts write there, too:
``objects.py`` makes what is read prove itself.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

ABSENT: Final = -1


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
    other error.
    """

    async def exists(self, names: Sequence[str]) -> Sequence[bool]:
        """Whether each object is there."""
        ...

    async def get(self, names: Sequence[str], into: Sequence[memoryview]) -> Sequence[int]:
        """Reads objects side by side.

        Args:
            into: a writable buffer of bytes a name.

        Returns:
            The bytes of each object; ``ABSENT`` where it is not there. An object longer than its buffer is not read.
        """
        ...

    async def put(self, names: Sequence[str], objects: Sequence[bytes]) -> None:
        """Writes objects side by side, perhaps on after a cancelled call. One that is there already stays or is
        replaced. Readers see all of it or nothing."""
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
    """A store cannot do what was asked. No message has a credential in it."""


class RemoteUnavailable(RemoteError):
    """It does not answer, is overloaded or failed: it may work again by itself."""


class RemoteRefused(RemoteError):
    """It answers and will not: credentials, rights, a bucket that is not there. An operator can mend it."""


class RemoteFull(RemoteError):
    """It has no room."""
