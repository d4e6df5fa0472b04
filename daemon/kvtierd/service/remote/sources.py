"""The sources of blocks: the store and other daemons. The quickest source that has an object gives it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final, NamedTuple

from kvtierd.service.remote.known import HOLE_S, UNREADABLE_S, Known
from kvtierd.tiers.remote.base import ABSENT, FAILED, RemoteError
from kvtierd.tiers.remote.breaker import Guarded

_NEWS: Final = 0.2
"""Weight of the last fetch in the expected cost of a byte."""


class Source:
    """A store or a peer. ``seconds_a_byte``: measured average; 0 = not measured yet."""

    def __init__(self, name: str, store: Guarded) -> None:
        self.name: Final = name
        self.store: Final = store
        self.seconds_a_byte = 0.0

    async def get(self, names: Sequence[str], into: Sequence[memoryview]) -> Sequence[int]:
        """Reads objects. Returns nothing if the store fails, and ``ABSENT`` for each object if it answers for none."""
        started = time.monotonic()
        try:
            sizes = await self.store.get(names, into)
        except RemoteError as failed:
            return [ABSENT] * len(names) if failed.of_object else ()
        nbytes = sum(size for size in sizes if size > 0)
        if nbytes:
            cost = (time.monotonic() - started) / nbytes
            self.seconds_a_byte += (cost - self.seconds_a_byte) * (_NEWS if self.seconds_a_byte else 1.0)
        return sizes


class Fetched(NamedTuple):
    """``nbytes``: length of the object; ``ABSENT`` if no source gave it. ``source``: the source that gave it."""

    nbytes: int
    source: Source | None


_NOWHERE: Final = Fetched(ABSENT, None)


class Sources:
    """Reads objects from the store and the peers. Loop thread only.

    Args:
        store: the store that ``known`` describes; None = only peers.
        peers: their blocks are known without a call.
    """

    def __init__(self, store: Source | None, known: Known, peers: Sequence[Source]) -> None:
        self.store: Final = store
        self.peers: Final = peers
        self._known: Final = known

    def seconds(self, nbytes: int) -> float:
        """Expected seconds to fetch ``nbytes`` from the quickest source; 0 = unknown."""
        measured = [each.seconds_a_byte for each in (*self.peers, self.store) if each is not None]
        return nbytes * min((one for one in measured if one), default=0.0)

    async def exists(self, names: Sequence[str], *, in_store: bool = True) -> list[bool]:
        """Whether any source has each object; ``in_store``: the store counts. Raises RemoteError if the store must be
        asked and fails."""
        held = await self._held(names)
        unknown = [name for name in names if name not in held and self._known.of(name) is None]
        if self.store is not None and in_store and unknown:
            for name, there in zip(unknown, await self.store.store.exists(unknown), strict=True):
                self._known.note([name], there=there)
        return [name in held or (in_store and self._known.of(name) is True) for name in names]

    async def get(self, names: Sequence[str], into: Sequence[memoryview], *, in_store: bool = True) -> list[Fetched]:
        """Reads objects like a store. An object counts as absent if every source that has it fails. ``in_store``: the
        store is asked, too."""
        held, found = await self._held(names), [_NOWHERE] * len(names)
        asked = (*self.peers, self.store if in_store else None)
        for source in sorted(filter(None, asked), key=lambda each: each.seconds_a_byte):
            wanted = [
                number
                for number, name in enumerate(names)
                if found[number].nbytes == ABSENT and (source is self.store or source in held.get(name, ()))
            ]
            if wanted:
                sizes = await source.get([names[number] for number in wanted], [into[number] for number in wanted])
                for number, nbytes in zip(wanted, sizes, strict=False):  # a failed source returns no sizes
                    found[number] = Fetched(max(nbytes, ABSENT), source)
                    if source is self.store and nbytes in (ABSENT, FAILED):
                        seconds = UNREADABLE_S if nbytes == FAILED else HOLE_S
                        self._known.note([names[number]], there=False, seconds=seconds)
        self._known.use(
            name for name, one in zip(names, found, strict=True) if one.nbytes > 0 and one.source is self.store
        )
        return found

    def pass_over(self, name: str) -> None:
        """Marks an object as absent for a while, so that it is not fetched again soon."""
        self._known.note([name], there=False, seconds=UNREADABLE_S)

    def knows_holes(self) -> bool:
        """Whether a fetch has met an absent or unreadable object. Always false with peers: they may have the object."""
        return not self.peers and self._known.has_holes()

    def lacks(self, name: str) -> bool:
        return self._known.of(name) is False

    async def _held(self, names: Sequence[str]) -> dict[str, list[Source]]:
        """The peers that have each object, by name."""
        held: dict[str, list[Source]] = {}
        for peer in self.peers:
            try:
                there = await peer.store.exists(names)
            except RemoteError:
                continue  # the peer is away; its breaker shows in the metrics
            for name, has in zip(names, there, strict=True):
                if has:
                    held.setdefault(name, []).append(peer)
        return held
