"""An L2 adapter of LMCache's server: objects of any size in blocks of one size, under LMCache's own keys.

    lmcache server --l2-adapter '{"type": "native_plugin", "module_path": "kvtier.connectors.lmcache",
      "class_name": "KvtierL2", "adapter_params": {"address": "/run/kvtier", "block_bytes": 1048576}}'

An object is cut into pieces, each in a block of its own. A block ends with the length and the digest of the object:
mixed pieces of two objects under one key are a miss, and so is an object of another length. The key of a piece is the
SHA-256 of the object's key and the number of the piece. LMCache itself is not imported.
"""

from __future__ import annotations

import logging
import os
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import sha256
from itertools import count
from typing import Any, Final, TypeAlias

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvtier.abi.spec import MAX_BLOCK_BYTES, CacheSpec, PoolSpec, WindowGroupSpec
from kvtier.connectors.store import SETTINGS, Store
from kvtier.engine import EngineOptions
from kvtier.errors import InvalidArgument, KvtierError

DEFAULT_BLOCK_BYTES: Final = 1 << 20
_END: Final = struct.Struct("<Q16s")
"""End of a block, after the piece: length and digest of the object."""
_MOST_PIECES: Final = 256
"""A delete looks for this number of pieces, or for the number of the longest object's pieces if it is greater."""
_MOST_LENGTHS: Final = 1 << 16
"""Maximum number of objects whose length is remembered."""
_STAGED_BYTES: Final = 32 << 20
"""Bytes of pieces that an operation stages at a time between LMCache's buffers and kvtier."""
_THREADS: Final = 4

_log = logging.getLogger("kvtier.connectors")

Completion: TypeAlias = tuple[int, bool, str, list[bool]]
"""Number of the operation, its success as a whole, the text of an error, and one result per key."""


@dataclass(slots=True, frozen=True)
class _ObjectPart:
    """``part`` of object number ``of``."""

    of: int
    key: bytes
    part: NDArray[np.uint8]


class KvtierL2:
    """The interface of LMCache's ``native_plugin``. Operations run in threads; LMCache polls :meth:`event_fd`."""

    def __init__(self, *, namespace: str = "", block_bytes: int = DEFAULT_BLOCK_BYTES, **settings: Any) -> None:
        """
        Args:
            namespace: keys of another namespace are never found. Name properties that LMCache's keys leave out, like
                the dtype.
            block_bytes: size of a piece. Objects whose size is a multiple of it waste no space.
            settings: see ``docs/engines.md``.

        Raises: :class:`kvtier.KvtierError` for wrong settings if ``on_error`` is not ``continue``.
        """
        self._store: Store | None = None
        self._block_bytes: Final = block_bytes
        self._staged_pieces = 1
        self._most_pieces = _MOST_PIECES
        self._lengths: Final[dict[str, int]] = {}
        try:
            if not isinstance(block_bytes, int) or not 4096 <= block_bytes <= MAX_BLOCK_BYTES - _END.size:
                raise InvalidArgument("block_bytes", block_bytes, f"4096 to {MAX_BLOCK_BYTES - _END.size}")
            self._staged_pieces = max(1, _STAGED_BYTES // block_bytes)
            pool = PoolSpec.opaque(block_bytes + _END.size)
            groups = (WindowGroupSpec(flat=True, pools=(pool,)),)
            options = EngineOptions.of(settings, SETTINGS)
            named = f"{namespace} {options.weights_version}" if options.weights_version else str(namespace)
            identity = {"engine": "lmcache", "namespace": sha256(named.encode()).hexdigest()}
            self._store = Store(options, CacheSpec("lmcache", "uint8", 1, groups=groups, identity=identity))
        except KvtierError as error:
            if settings.get("on_error", "continue") != "continue":
                raise
            _log.error("LMCache runs without kvtier: %s", error)
        self._numbers: Final = count(1)
        self._event: Final = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._done: list[Completion] = []
        self._lock: Final = threading.Lock()
        self._threads: Final = ThreadPoolExecutor(_THREADS, thread_name_prefix="kvtier-l2")

    def event_fd(self) -> int:
        """Returns a file descriptor that is readable while completions wait."""
        return self._event

    def submit_batch_exists(self, keys: Sequence[str]) -> int:
        """Looks objects up. An object is stored if all its pieces are."""
        return self._submit(len(keys), lambda store: self._exist(store, keys))

    def submit_batch_get(self, keys: Sequence[str], views: Sequence[memoryview]) -> int:
        """Fills the views, each of its object's length."""
        return self._submit(len(keys), lambda store: self._load(store, keys, views))

    def submit_batch_set(self, keys: Sequence[str], views: Sequence[memoryview]) -> int:
        """Stores each view's bytes."""
        return self._submit(len(keys), lambda store: self._save(store, keys, views), whole=True)

    def submit_batch_delete(self, keys: Sequence[str]) -> int:
        return self._submit(len(keys), lambda store: [self._drop(store, key) for key in keys])

    def drain_completions(self) -> list[Completion]:
        """Returns the operations that have ended since the last call."""
        with self._lock:
            done, self._done = self._done, []
            if done:
                os.eventfd_read(self._event)
        return done

    def close(self) -> None:
        """Waits for running operations, cancels the others, and closes the cache."""
        self._threads.shutdown(cancel_futures=True)
        if self._store is not None:
            self._store.close()
        os.close(self._event)

    def _submit(self, objects: int, work: Callable[[Store], list[bool]], *, whole: bool = False) -> int:
        """Queues an operation. ``whole``: for LMCache it is a success only if every object was stored."""
        number = next(self._numbers)

        def run() -> None:
            results = [False] * objects if self._store is None else work(self._store)
            good = all(results) or not whole
            with self._lock:
                self._done.append((number, good, "" if good else "not stored by kvtier", results))
                os.eventfd_write(self._event, 1)

        self._threads.submit(run)
        return number

    # -- in a thread -----------------------------------------------------------------------------------------------

    def _batches(self, keys: Sequence[str], views: Sequence[memoryview]) -> Iterator[list[_ObjectPart]]:
        pieces: list[_ObjectPart] = []
        for at, (key, view) in enumerate(zip(keys, views, strict=True)):
            whole = np.frombuffer(view, np.uint8)
            for number, start in enumerate(range(0, len(whole), self._block_bytes)):
                pieces.append(_ObjectPart(at, _key_of(key, number), whole[start : start + self._block_bytes]))
        step = self._staged_pieces
        yield from (pieces[first : first + step] for first in range(0, len(pieces), step))

    def _remember(self, key: str, nbytes: int) -> None:
        with self._lock:
            self._lengths[key] = nbytes
            self._most_pieces = max(self._most_pieces, -(-nbytes // self._block_bytes))
            while len(self._lengths) > _MOST_LENGTHS:
                del self._lengths[next(iter(self._lengths))]

    def _exist(self, store: Store, keys: Sequence[str]) -> list[bool]:
        """Looks objects up. An object that is new to this process has its length at the end of its first block."""
        first = dict(zip(keys, store.find(0, [_key_of(key, 0) for key in keys]), strict=True))
        unmet = [key for key, there in first.items() if there and key not in self._lengths]
        for start in range(0, len(unmet), self._staged_pieces):
            some = unmet[start : start + self._staged_pieces]
            rows = self._rows(len(some))
            loaded = store.load(0, [_key_of(key, 0) for key in some], list(rows))
            for key, row, found in zip(some, rows, loaded, strict=True):
                if found:
                    self._remember(key, _END.unpack(row[-_END.size :])[0])
        rest = {
            key: [_key_of(key, number) for number in range(1, -(-nbytes // self._block_bytes))]
            for key, there in first.items()
            if there and (nbytes := self._lengths.get(key)) is not None
        }
        pieces = [piece for each in rest.values() for piece in each]
        gone = {piece for piece, there in zip(pieces, store.find(0, pieces), strict=True) if not there}
        return [key in rest and gone.isdisjoint(rest[key]) for key in keys]

    def _rows(self, count: int) -> NDArray[np.uint8]:
        return np.zeros((count, self._block_bytes + _END.size), np.uint8)

    def _save(self, store: Store, keys: Sequence[str], views: Sequence[memoryview]) -> list[bool]:
        """Stores objects, and drops each that is not stored whole. Returns a result for each object."""
        results = [True] * len(keys)
        ends = [_END.pack(view.nbytes, xxhash.xxh3_128_digest(view)) for view in views]
        for batch in self._batches(keys, views):
            others = self._drop_others(store, batch, ends)
            rows = self._rows(len(batch))
            for piece, row in zip(batch, rows, strict=True):
                row[: len(piece.part)] = piece.part
                row[-_END.size :] = np.frombuffer(ends[piece.of], np.uint8)
            for piece, saved in zip(batch, store.save(0, [piece.key for piece in batch], rows), strict=True):
                results[piece.of] &= saved and piece.of not in others
        for key, view, saved in zip(keys, views, results, strict=True):
            self._remember(key, view.nbytes)
            if not saved:
                self._drop(store, key)
        return results

    def _load(self, store: Store, keys: Sequence[str], views: Sequence[memoryview]) -> list[bool]:
        """Fills the views. Returns whether each object is stored with the view's length, by a single set."""
        results, ends = [True] * len(keys), dict[int, bytes]()
        for batch in self._batches(keys, views):
            rows = self._rows(len(batch))
            loaded = store.load(0, [piece.key for piece in batch], list(rows))
            for piece, row, found in zip(batch, rows, loaded, strict=True):
                end = row[-_END.size :].tobytes()
                same = ends.setdefault(piece.of, end) == end and _END.unpack(end)[0] == views[piece.of].nbytes
                results[piece.of] &= found and same
                if found and same:
                    piece.part[:] = row[: len(piece.part)]
        return results

    def _drop_others(self, store: Store, batch: Sequence[_ObjectPart], ends: Sequence[bytes]) -> set[int]:
        """Drops stored pieces whose digest differs. Returns the numbers of the objects whose old pieces stay, because a
        reader holds them."""
        stored = store.probe(0, [piece.key for piece in batch])
        there = [piece for piece, found in zip(batch, stored, strict=True) if found]
        rows = self._rows(len(there))
        loaded = store.load(0, [piece.key for piece in there], list(rows))
        found = [(piece, row[-_END.size :].tobytes()) for piece, row, ok in zip(there, rows, loaded, strict=True) if ok]
        others = {piece.key: piece.of for piece, end in found if end != ends[piece.of]}
        return set() if not others or store.drop(0, list(others)) else set(others.values())

    def _drop(self, store: Store, key: str) -> bool:
        """Drops all pieces of an object. Returns whether pieces were stored and all are gone."""
        if key not in self._lengths:
            self._exist(store, [key])  # remembers the number of pieces
        pieces = [_key_of(key, number) for number in range(self._most_pieces)]
        there = [piece for piece, found in zip(pieces, store.probe(0, pieces), strict=True) if found]
        return store.drop(0, there)


def _key_of(key: str, number: int) -> bytes:
    return sha256(f"{number}@{key}".encode()).digest()
