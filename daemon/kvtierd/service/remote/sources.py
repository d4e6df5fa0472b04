"""The sources of blocks: the store and other daemons. The quickest source that has an object gives it.

The daemon's knowledge of a source's objects, their presence and their last fetch, is bounded and never certain.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Final, NamedTuple

from kvtierd.tiers.remote.base import ABSENT, FAILED, RemoteError
from kvtierd.tiers.remote.breaker import Guarded

MOST: Final = 1 << 15
THERE_S: Final = 600.0
"""Seconds that a present object is believed present. The store's own rules may delete it; a fetch then notices."""
ABSENT_S: Final = 5.0
"""Seconds that an absent object is believed absent. Another host may write it at any time."""
UNREADABLE_S: Final = 600.0
"""Seconds that an object counts as absent if the store has it but does not give it: an operator must repair it."""
HOLE_S: Final = 30.0
"""Seconds that an object counts as absent after a fetch missed it, although the store has a child of its block."""


class Known:
    """Maps names to knowledge; above ``most`` names the oldest are dropped. Loop thread only.

    Entries are a hash of the name and a float, since a full map stays in memory for good. Two names with the same hash
    cost a miss, never a wrong byte.
    """

    def __init__(self, clock: Callable[[], float], most: int = MOST) -> None:
        self._clock = clock
        self._most = most
        self._until: dict[int, float] = {}
        """When knowledge of an object expires, by the hash of its name; negative = the object is absent."""
        self._used: dict[int, float] = {}
        self._holes_until = 0.0

    def of(self, name: str) -> bool | None:
        """Whether the object is in the store; None = unknown, the store must be asked."""
        until = self._until.get(hash(name), 0.0)
        return until > 0 if abs(until) > self._clock() else None

    def note(self, names: Iterable[str], *, there: bool, seconds: float | None = None) -> None:
        """Notes that objects are, or are not, in the store. The note is valid for ``seconds``."""
        until = self._clock() + (seconds or (THERE_S if there else ABSENT_S))
        if seconds is not None:
            self._holes_until = max(self._holes_until, until)
        self._keep(self._until, names, until if there else -until)

    def has_holes(self) -> bool:
        """Whether any note with its own ``seconds`` is still valid."""
        return self._holes_until > self._clock()

    def use(self, names: Iterable[str]) -> None:
        """Notes that objects were fetched now."""
        self._keep(self._used, names, time.time())

    def used_s(self, name: str) -> float:
        """When this daemon last fetched the object, in seconds since 1970; 0 = never, or the note was dropped."""
        return self._used.get(hash(name), 0.0)

    def _keep(self, times: dict[int, float], names: Iterable[str], at: float) -> None:
        """Puts the names last. Drops the oldest an eighth at a time: a dict takes long to find its first key."""
        for name in map(hash, names):
            times.pop(name, None)
            times[name] = at
        excess = len(times) - self._most
        if excess > 0:
            for name in list(islice(times, max(excess, self._most // 8))):
                del times[name]


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
        self.known: Final = known

    def seconds(self, nbytes: int) -> float:
        """Expected seconds to fetch ``nbytes`` from the quickest source; 0 = unknown."""
        measured = [each.seconds_a_byte for each in (*self.peers, self.store) if each is not None]
        return nbytes * min((one for one in measured if one), default=0.0)

    async def exists(self, names: Sequence[str], *, in_store: bool = True) -> list[bool]:
        """Whether any source has each object; ``in_store``: the store counts. Raises RemoteError if the store must be
        asked and fails."""
        held = await self._held(names)
        unknown = [name for name in names if name not in held and self.known.of(name) is None]
        if self.store is not None and in_store and unknown:
            for name, there in zip(unknown, await self.store.store.exists(unknown), strict=True):
                self.known.note([name], there=there)
        return [name in held or (in_store and self.known.of(name) is True) for name in names]

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
                        self.known.note([names[number]], there=False, seconds=seconds)
        self.known.use(
            name for name, one in zip(names, found, strict=True) if one.nbytes > 0 and one.source is self.store
        )
        return found

    def knows_holes(self) -> bool:
        """Whether a fetch has met an absent or unreadable object. Always false with peers: they may have the object."""
        return not self.peers and self.known.has_holes()

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
