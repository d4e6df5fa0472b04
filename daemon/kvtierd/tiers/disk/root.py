"""The disk tier's directory: its owner, its lock, and the caches in it.

::

    SUPERBLOCK            marks the directory as kvtier's
    LOCK                  flock, with the process id of the daemon that holds it
    caches/<name>/
        SUPERBLOCK        specification, fingerprint, budgets and options
        group-<n>.slab    payload of window group n
        index/            LMDB

The root's superblock is read, and the lock taken, before any write: a refused directory stays as it was. A cache is
made under a name that starts with a dot and renamed when complete; a removal goes the other way round. A damaged cache
is left as it is, and other caches are served. A cache of another version of kvtier is renamed to a name that starts
with ``.aside-``, and never read again.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Self

from pydantic import ByteSize

from kvtier.abi.spec import CacheSpec, SpecError
from kvtierd.core.ids import GroupId
from kvtierd.tiers.base import DamagedDirectory, ForeignDirectory, TierConfigError, TierError, TierIOError
from kvtierd.tiers.disk import superblock
from kvtierd.tiers.disk.index import index_bytes
from kvtierd.tiers.disk.slab import SlabShape
from kvtierd.tiers.disk.store import DiskStore, create_files, grow_files, trim_files

LOCK: Final = "LOCK"
CACHES: Final = "caches"
_OURS_WHILE_NEW: Final = frozenset({LOCK, superblock.SUPERBLOCK + ".new", "lost+found"})
"""Files of an interrupted initialisation, and of a fresh file system."""
_UNFINISHED: Final = ".new-"
_REMOVED: Final = ".gone-"
_ASIDE: Final = ".aside-"
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_log = logging.getLogger(__name__)

_MAX_SLOTS: Final = 1 << 31
_DEFAULT_FLOOR: Final = 1 << 30
_DEFAULT_FLOOR_PART: Final = 20


@dataclass(slots=True, frozen=True)
class StoredCache:
    """A cache on disk. ``options``: JSON values, kept for the service."""

    name: str
    spec: CacheSpec
    slots: Mapping[GroupId, int]
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True, frozen=True)
class _CacheBlock:
    """A cache's superblock, verified."""

    cache: StoredCache
    map_bytes: int

    @property
    def shapes(self) -> dict[GroupId, SlabShape]:
        spec = self.cache.spec
        return {
            group: SlabShape(spec.record_bytes(group), slots, chained=spec.attention(group).chained)
            for group, slots in self.cache.slots.items()
        }


class DiskRoot:
    """The directory, held by a single process, for any of its threads. Caches are made, opened and removed one at a
    time."""

    def __init__(self, path: Path, lock: superblock.DirectoryLock, floor_bytes: int, durable: bool) -> None:
        self._path = path
        self._lock = lock
        self._floor_bytes = floor_bytes
        self._durable = durable
        self._stores: dict[str, DiskStore] = {}
        self._changing = threading.RLock()
        self.taken_away: Final[set[str]] = set()
        """Caches whose directories this start has set aside, or has deleted to finish an interrupted call."""

    @classmethod
    def open(cls, path: Path, floor_bytes: int | None = None, *, durable: bool = False) -> Self:
        """Takes the directory, and initialises it if it is missing or empty.

        ``floor_bytes``: space that stays free on its file system; default 1 GiB or 5 %, whichever is less. ``durable``:
        of its stores, see :meth:`DiskStore.open`. Raises :class:`LockedDirectory`, :class:`ForeignDirectory`,
        :class:`DamagedDirectory` (nothing was touched), :class:`TierConfigError` (less than the floor is free for a new
        directory), :class:`TierIOError`.
        """
        with superblock.io_errors(f"cannot open {path}"):
            new = _is_new(path)
            floor = _floor(path) if floor_bytes is None else floor_bytes
            if new:
                _require_room(path, 0, floor)
                superblock.make_private_directory(path)
            lock = superblock.DirectoryLock.take(path / LOCK)
            try:
                root = cls(path, lock, floor, durable)
                root._prepare()
            except BaseException:
                lock.release()
                raise
        return root

    def directory_of(self, name: str) -> Path:
        """The directory of a cache, which need not exist."""
        return self._path / CACHES / name

    def note_opening(self, name: str) -> None:
        with suppress(OSError):  # the note is only an order in which caches give way
            os.utime(self.directory_of(name) / superblock.SUPERBLOCK)

    def last_openings(self) -> dict[str, float]:
        """The time of each cache's last noted opening, by name."""
        with suppress(OSError):
            return {path.name: (path / superblock.SUPERBLOCK).stat().st_mtime for path in _directories(self._path)}
        return {}

    def caches(self) -> list[StoredCache]:
        """The stored caches that can be trusted, by name."""
        return stored_caches(self._path)

    def damaged(self) -> dict[str, str]:
        """The stored caches that cannot be trusted: name and reason."""
        found = {directory.name: _read_or_fault(directory) for directory in _directories(self._path)}
        return {name: str(fault) for name, fault in found.items() if isinstance(fault, TierError)}

    def create(
        self,
        name: str,
        spec: CacheSpec,
        slots: Mapping[GroupId, int],
        options: Mapping[str, Any] | None = None,
        label_bytes: int = 0,
    ) -> DiskStore:
        """Makes a cache with a slab of ``slots`` records per group. Returns its store, empty and ready for use.

        ``label_bytes``: room in the index for each block's label. Raises :class:`TierConfigError` (bad or taken name,
        slots, or too little free space) before any change, :class:`TierIOError`.
        """
        with self._changing:
            final = self._path / CACHES / name
            if not _NAME.fullmatch(name):
                raise TierConfigError("name", name, "1 to 128 of [A-Za-z0-9._-], first a letter or a digit")
            if final.exists():
                raise TierConfigError("name", name, "not the name of a stored cache")
            _check_slots(spec, slots)
            map_bytes = index_bytes(sum(slots.values()), label_bytes)
            block = _CacheBlock(StoredCache(name, spec, dict(slots), dict(options or {})), map_bytes)
            wanted = sum(shape.nbytes for shape in block.shapes.values()) + block.map_bytes
            _require_room(self._path, wanted, self._floor_bytes)

            unfinished = final.with_name(_UNFINISHED + name)
            with superblock.io_errors(f"cannot create {final}"):
                try:
                    superblock.make_private_directory(unfinished)
                    create_files(unfinished, block.shapes, block.map_bytes)
                    superblock.write_superblock(unfinished, "cache", _encode(block))
                    unfinished.rename(final)
                except BaseException:
                    shutil.rmtree(unfinished, ignore_errors=True)
                    raise
                superblock.sync_directory(final.parent)
            store = self.open_cache(name)
            store.recover()
            return store

    def resize(self, name: str, slots: Mapping[GroupId, int], options: Mapping[str, Any], label_bytes: int = 0) -> None:
        """Gives a stored cache that is not open other slots and options. Its next opening drops the records beyond a
        smaller slab. After a crash it has its old slots or the new ones.

        Raises :class:`TierConfigError` (too little free space), :class:`DamagedDirectory`, :class:`TierIOError`.
        """
        directory = self._path / CACHES / name
        with self._changing:
            before = _read_cache(directory)
            map_bytes = max(before.map_bytes, index_bytes(sum(slots.values()), label_bytes))
            after = _CacheBlock(replace(before.cache, slots=dict(slots), options=dict(options)), map_bytes)
            growth = [shape.nbytes - before.shapes[group].nbytes for group, shape in after.shapes.items()]
            _require_room(
                self._path, sum(max(0, more) for more in growth) + map_bytes - before.map_bytes, self._floor_bytes
            )
            shapes = before.shapes
            with superblock.io_errors(f"cannot resize {directory}"):
                try:
                    grow_files(directory, after.shapes, map_bytes)
                    superblock.write_superblock(directory, "cache", _encode(after))
                    shapes = after.shapes
                finally:
                    trim_files(directory, shapes)

    def open_cache(self, name: str) -> DiskStore:
        """The store of a stored cache, to be recovered before use. Raises :class:`TierConfigError` (the cache does not
        exist, or is open already), :class:`DamagedDirectory`, :class:`TierIOError`."""
        with self._changing:
            earlier = self._stores.get(name)
            if earlier and not earlier.closed:
                raise TierConfigError("name", name, "not the name of a cache that is open")
            directory = self._path / CACHES / name
            if not _NAME.fullmatch(name) or not directory.exists():
                raise TierConfigError("name", name, "the name of a stored cache")
            block = _read_cache(directory)
            fingerprint = block.cache.spec.fingerprint()
            store = DiskStore.open(directory, block.shapes, fingerprint, block.map_bytes, durable=self._durable)
            self._stores[name] = store
            return store

    def remove(self, name: str) -> None:
        """Deletes a stored cache, sound or damaged, after closing its store. Does nothing if there is no cache. After a
        crash during the call, the cache is whole, or gone at the next start. Raises :class:`TierIOError`."""
        if not _NAME.fullmatch(name):
            raise TierConfigError("name", name, "the name of a stored cache")
        directory = self._path / CACHES / name
        with self._changing, superblock.io_errors(f"cannot remove {directory}"):
            store = self._stores.pop(name, None)
            if store is not None:
                store.close()
            if not directory.exists() and not directory.is_symlink():
                return
            gone = directory.with_name(_REMOVED + name)
            if gone.exists():
                _delete(gone)
            directory.rename(gone)
            superblock.sync_directory(directory.parent)
            _delete(gone)

    def close(self) -> None:
        """Closes all open stores and releases the directory."""
        for store in self._stores.values():
            store.close()
        self._lock.release()

    def _prepare(self) -> None:
        """Finishes an interrupted initialisation, creation or removal."""
        if superblock.read_superblock(self._path, "disk") is None:
            superblock.write_superblock(self._path, "disk", {})
        superblock.refuse_link(self._path / CACHES)
        superblock.make_private_directory(self._path / CACHES)
        for pattern in (_UNFINISHED, _REMOVED):
            for leftover in (self._path / CACHES).glob(pattern + "*"):
                _delete(leftover)
                self.taken_away.add(leftover.name.removeprefix(pattern))

        for directory in _directories(self._path):
            try:
                superblock.read_superblock(directory, "cache")
            except superblock.OtherDirectoryVersion as error:
                aside, number = directory.with_name(f"{_ASIDE}{directory.name}"), 1
                while aside.exists():
                    number += 1
                    aside = directory.with_name(f"{_ASIDE}{directory.name}.{number}")
                directory.rename(aside)
                superblock.sync_directory(directory.parent)
                self.taken_away.add(directory.name)
                _log.warning("a cache is set aside name=%s why=%r kept_as=%s", directory.name, error.why, aside)
            except TierError:
                pass  # damaged() reports the cache


def stored_caches(path: Path) -> list[StoredCache]:
    """The caches below a disk tier's directory that can be trusted, by name. Takes no lock. Raises OSError."""
    found = (_read_or_fault(directory) for directory in _directories(path))
    return [block.cache for block in found if isinstance(block, _CacheBlock)]


def _directories(path: Path) -> list[Path]:
    hidden = (_UNFINISHED, _REMOVED, _ASIDE)
    return sorted(entry for entry in (path / CACHES).iterdir() if not entry.name.startswith(hidden))


def _is_new(path: Path) -> bool:
    """Whether ``path`` is to be initialised. Raises :class:`ForeignDirectory` or :class:`DamagedDirectory`."""
    if not path.exists():
        return True
    if not path.is_dir():
        raise ForeignDirectory(path, "is not a directory")
    # Listed before the superblock is read: another daemon may be taking the directory meanwhile.
    foreign = sorted(set(os.listdir(path)) - _OURS_WHILE_NEW)
    if superblock.read_superblock(path, "disk") is not None:
        return False
    if foreign and superblock.SET_ASIDE not in foreign:
        raise ForeignDirectory(path, f"is not empty (it has {foreign[0]!r}) and has no kvtier {superblock.SUPERBLOCK}")
    return not foreign


def _read_or_fault(directory: Path) -> _CacheBlock | TierError:
    try:
        return _read_cache(directory)
    except (DamagedDirectory, TierIOError) as error:
        return error


def _delete(directory: Path) -> None:
    """Deletes a directory; of a link only the link itself."""
    if directory.is_symlink():
        directory.unlink()
    else:
        shutil.rmtree(directory)


def _read_cache(directory: Path) -> _CacheBlock:
    with superblock.io_errors(f"cannot open {directory}"):
        superblock.refuse_link(directory)
    content = superblock.read_superblock(directory, "cache")
    if content is None:
        raise DamagedDirectory(directory, f"has no {superblock.SUPERBLOCK}")
    try:
        spec = CacheSpec.from_dict(content["spec"])
        slots = {GroupId(group): int(count) for group, count in enumerate(content["slots"])}
        _check_slots(spec, slots)
        options = dict(content["options"])
        block = _CacheBlock(StoredCache(content["name"], spec, slots, options), int(content["index_bytes"]))
    except (KeyError, TypeError, ValueError, SpecError, TierConfigError) as error:
        raise DamagedDirectory(directory, f"its {superblock.SUPERBLOCK} makes no sense: {error!r}") from error
    if block.cache.name != directory.name:
        raise DamagedDirectory(directory, f"its {superblock.SUPERBLOCK} is of cache {block.cache.name!r}")
    if content.get("fingerprint") != spec.fingerprint().hex():
        raise DamagedDirectory(directory, "its specification does not have the fingerprint it was made with")
    return block


def _encode(block: _CacheBlock) -> dict[str, object]:
    spec = block.cache.spec
    return {
        "name": block.cache.name,
        "spec": spec.to_dict(),
        "fingerprint": spec.fingerprint().hex(),
        "slots": [block.cache.slots[group] for group in sorted(block.cache.slots)],
        "index_bytes": block.map_bytes,
        "options": dict(block.cache.options),
    }


def _check_slots(spec: CacheSpec, slots: Mapping[GroupId, int]) -> None:
    if sorted(slots) != list(range(len(spec.groups))):
        raise TierConfigError("slots", dict(slots), f"a count for each of {len(spec.groups)} groups")
    for group, count in slots.items():
        if not 1 <= count <= _MAX_SLOTS:
            raise TierConfigError(f"slots[{group}]", count, f"1 to {_MAX_SLOTS}")


def _existing(path: Path) -> Path:
    return path if path.exists() else _existing(path.parent)


def _floor(path: Path) -> int:
    status = os.statvfs(_existing(path))
    return min(_DEFAULT_FLOOR, status.f_blocks * status.f_frsize // _DEFAULT_FLOOR_PART)


def _require_room(path: Path, wanted: int, floor: int) -> None:
    status = os.statvfs(_existing(path))
    free = status.f_bavail * status.f_frsize
    if free - wanted < floor:
        asked, has, stays = (ByteSize(each).human_readable(separator=" ") for each in (wanted, free, floor))
        raise TierConfigError("", wanted, f"{asked} asked for, {has} free on {path}, {stays} must stay free")
