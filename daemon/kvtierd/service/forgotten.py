"""Remembers when each cache forgot its blocks, so that no store and no other daemon brings them back.

A block of an older revision has another object name. A revision is the time of the last reset of the cache, or of the
last drop of the block or one of its ancestors, whichever is later.

A cache of another specification is another cache: records are by :attr:`ServedCache.prefix`, ``NAME/FINGERPRINT``.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import threading
import time
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterable, Mapping, Set
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Self
from weakref import WeakValueDictionary

from kvtierd.core.ids import KEY_BYTES, GroupId, Key
from kvtierd.tiers.base import DamagedDirectory
from kvtierd.tiers.disk import superblock

MOST_DROPPED: Final = 8_192
"""Most single drops that a cache remembers. With more, the cache is reset."""
_MOST_KEPT: Final = 2_048
"""Most kept blocks in a file. With more, the cache is reset after a restart, when none of them is in use."""
_KIND: Final = "forgotten"
_TIME_BYTES: Final = 8
_LATEST: Final = 1 << 63

_FILES: Final = threading.Lock()
"""Held while a file is made: its directory must not be removed meanwhile."""
_log = logging.getLogger(__name__)

BlockPlace = tuple[GroupId, Key]
Dropped = Mapping[BlockPlace, int]


@dataclass(slots=True, frozen=True)
class Past:
    """The times when a cache forgot blocks, in nanoseconds since 1970. Times only rise. ``generation``: the last reset;
    0 = none. ``dropped``: later drops of single blocks."""

    generation: int = 0
    dropped: Dropped = field(default_factory=dict)

    def after_reset(self) -> Past:
        return Past(self._now())

    def after_drop(self, group: GroupId, keys: Collection[Key]) -> Past:
        return self.joined(Past(0, dict.fromkeys(((group, key) for key in keys), self._now()))) if keys else self

    def joined(self, other: Past) -> Past:
        """Returns the union of both pasts, which does not depend on their order."""
        generation = max(self.generation, other.generation)
        latest = dict(self.dropped)
        for place, at in other.dropped.items():
            latest[place] = max(at, latest.get(place, 0))
        dropped = {place: at for place, at in latest.items() if at > generation}
        return Past(generation, dropped) if len(dropped) <= MOST_DROPPED else Past(max(dropped.values()))

    def revision(self, group: GroupId, path: Iterable[Key]) -> int:
        """Returns the revision of a block. ``path``: its key, and the keys of its ancestors."""
        if not self.dropped:
            return self.generation
        return max(self.generation, *(self.dropped.get((group, key), 0) for key in path))

    def encoded(self) -> dict[str, Any]:
        """Returns plain JSON values."""
        dropped = ((group, key + at.to_bytes(_TIME_BYTES)) for (group, key), at in sorted(self.dropped.items()))
        return {"generation": self.generation, "dropped": _by_group(dropped)}

    @classmethod
    def decoded(cls, content: Mapping[str, Any]) -> Self:
        """Reads the values of :meth:`encoded`. Raises ValueError."""
        try:
            entries = _entries(content["dropped"], KEY_BYTES + _TIME_BYTES)
            dropped = {(group, Key(entry[:KEY_BYTES])): int.from_bytes(entry[KEY_BYTES:]) for group, entry in entries}
            past = cls(int(content["generation"]), dropped)
        except (ArithmeticError, AttributeError, LookupError, TypeError) as error:
            raise ValueError(repr(error)) from error
        if not all(0 <= at < _LATEST for at in (past.generation, *past.dropped.values())):
            raise ValueError("a time is out of range")
        return past

    def _now(self) -> int:
        return max(time.time_ns(), self.generation + 1, *(at + 1 for at in self.dropped.values()))


def _by_group(entries: Iterable[tuple[GroupId, bytes]]) -> dict[str, str]:
    parts: dict[str, list[str]] = {}
    for group, entry in entries:
        parts.setdefault(str(group), []).append(entry.hex())
    return {group: "".join(texts) for group, texts in parts.items()}


def _entries(by_group: Mapping[str, str], nbytes: int) -> list[tuple[GroupId, bytes]]:
    wholes = [(GroupId(int(group)), bytes.fromhex(text)) for group, text in by_group.items()]
    if any(len(whole) % nbytes for _, whole in wholes):
        raise ValueError(f"entries are not of {nbytes} bytes")
    return [(group, whole[at : at + nbytes]) for group, whole in wholes for at in range(0, len(whole), nbytes)]


@dataclass(slots=True, frozen=True)
class PastRecord:
    """A cache's past, and forgotten blocks that are still here. ``kept``: blocks in use during a reset, which stand for
    their descendants, too. ``due``: any block may be a forgotten block, so the cache must be reset."""

    past: Past = field(default_factory=Past)
    kept: frozenset[BlockPlace] = frozenset()
    due: bool = False


class Forgotten:
    """The record of every cache, each in a file of its own. A record outlives its cache. Loop thread only.

    Args:
        directory: of the files. The constructor reads all files, which blocks.
    """

    def __init__(self, directory: Path) -> None:
        self._directory: Final = directory
        with superblock.io_errors(f"cannot use {directory}"):
            for path in (directory, *directory.glob("*"), *directory.glob("*/*")):
                superblock.refuse_link(path)
        self._records: Final = {f"{path.parent.name}/{path.name}": _read(path) for path in directory.glob("*/*")}
        self._unwritten: Final[set[str]] = set()
        self._changing: Final[set[str]] = set()
        self._locks: Final[WeakValueDictionary[str, asyncio.Lock]] = WeakValueDictionary()

    @property
    def prefixes(self) -> Set[str]:
        return self._records.keys()

    def of(self, prefix: str) -> Past:
        """Returns the cache's past: the same object until it changes."""
        return self._records.get(prefix, _NOTHING).past

    def kept(self, prefix: str) -> frozenset[BlockPlace]:
        """Returns the forgotten blocks that were in use during a reset."""
        return self._records.get(prefix, _NOTHING).kept

    def is_due(self, prefix: str) -> bool:
        return self._records.get(prefix, _NOTHING).due

    def generation(self, prefix: str) -> int:
        """Returns the last reset that has ended; 0 = none."""
        return 0 if prefix in self._changing else self.of(prefix).generation

    def has_old(self, prefix: str) -> bool:
        """Returns whether forgotten blocks may still be here."""
        return prefix in self._changing or bool(self.kept(prefix)) or self.is_due(prefix)

    def is_changing(self, prefix: str) -> bool:
        return prefix in self._changing

    @asynccontextmanager
    async def change(self, prefix: str) -> AsyncIterator[Past]:
        """Holds the record of a cache while blocks are forgotten, then makes it durable. Yields the former past.

        The body calls :meth:`set` before the first block is dropped, so that no running fetch brings it back. If the
        body fails, the former record counts again, as no client got an answer. If the write fails, the new record
        counts, and is written with the next change. Raises TierIOError.
        """
        async with self._locks.setdefault(prefix, asyncio.Lock()):
            before = self._records.get(prefix, _NOTHING)
            self._changing.add(prefix)
            try:
                yield before.past
            except BaseException:
                self._records[prefix] = before
                raise
            finally:
                self._changing.discard(prefix)
            if self._records.get(prefix, _NOTHING) != before:
                self._unwritten.add(prefix)
            if prefix in self._unwritten:
                await self._write(prefix)

    def set(self, prefix: str, past: Past) -> None:
        """Sets the past. Call inside of :meth:`change`."""
        self._records[prefix] = replace(self._records.get(prefix, _NOTHING), past=past)

    def keep(self, prefix: str, places: Iterable[BlockPlace], *, due: bool = False) -> None:
        """Sets the forgotten blocks that are still here: see :class:`PastRecord`. Call inside of :meth:`change`."""
        self._records[prefix] = replace(self._records.get(prefix, _NOTHING), kept=frozenset(places), due=due)

    async def reset(self, name: str, prefix: str | None) -> None:
        """Forgets a removed cache's blocks, so that a new cache of the name gets none of them. ``prefix``: None = all
        caches of the name."""
        known = [each for each in self.prefixes if each.startswith(f"{name}/")]
        for each in known if prefix is None else [prefix]:
            async with self.change(each) as before:
                self.set(each, before.after_reset())
                self.keep(each, ())

    def begin(self, prefix: str) -> None:
        """Notes that a new cache has no forgotten blocks."""
        if self.has_old(prefix):
            self.keep(prefix, ())
            self._unwritten.add(prefix)

    async def remove(self, prefix: str, wanted: Callable[[], bool]) -> bool:
        """Removes the record of a cache, if it is still ``wanted`` under the record's lock. Returns whether it was
        removed. Raises TierIOError."""
        async with self._locks.setdefault(prefix, asyncio.Lock()):
            if found := prefix in self._records and wanted():
                del self._records[prefix]
                self._unwritten.discard(prefix)
                await _whole(asyncio.to_thread(_remove, self._directory / prefix))
        return found

    async def _write(self, prefix: str) -> None:
        await _whole(asyncio.to_thread(_write, self._directory / prefix, self._records[prefix]))
        self._unwritten.discard(prefix)


async def _whole(work: Coroutine[Any, Any, None]) -> None:
    """Awaits a thread's work to its end, even if cancelled: two threads must not change a file at the same time."""
    working = asyncio.ensure_future(work)
    try:
        await asyncio.shield(working)
    except asyncio.CancelledError:
        await asyncio.wait([working])
        raise


_NOTHING: Final = PastRecord()


def _read(path: Path) -> PastRecord:
    """Reads a file. If the file cannot be read, all blocks of the cache count as forgotten."""
    try:
        content = superblock.read_superblock(path, _KIND) or {}
        kept = _entries(content.get("kept", {}), KEY_BYTES)
        places = frozenset((group, Key(key)) for group, key in kept)
        return PastRecord(Past.decoded(content), places, bool(content.get("due")))
    except (DamagedDirectory, ValueError, TypeError, AttributeError) as error:
        superblock.set_aside(path)
        record = PastRecord(Past().after_reset(), due=True)
        _write(path, record)
        says = "a cache's past is set aside, so all its blocks count as forgotten cache=%s why=%r"
        _log.warning(says, path, str(error))
        return record


def _remove(path: Path) -> None:
    with _FILES, superblock.io_errors(f"cannot remove {path}"):
        with suppress(FileNotFoundError):  # the record was never written
            shutil.rmtree(path)
        if not any(path.parent.iterdir()):
            path.parent.rmdir()


def _write(path: Path, record: PastRecord) -> None:
    few = len(record.kept) <= _MOST_KEPT
    rest = {"kept": _by_group(sorted(record.kept) if few else ()), "due": record.due or not few}
    with _FILES, superblock.io_errors(f"cannot write {path}"):
        superblock.make_private_directory(path)
        superblock.write_superblock(path, _KIND, record.past.encoded() | rest)
