"""An L2 adapter of LMCache's server: objects of any size in blocks of one size, under LMCache's own keys.

    lmcache server --l2-adapter '{"type": "native_plugin", "module_path": "kvtier.connectors.lmcache",
      "class_name": "KvtierL2", "adapter_params": {"address": "/run/kvtier", "block_bytes": 1048576}}'

An object is cut into pieces; each is a block with the length of the object behind it, so that an object of another
length, as after a change of the model's dtype, is a miss. The key of a piece is the SHA-256 of namespace, object key
and number of the piece. LMCache itself is not imported.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from itertools import count, takewhile
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvtier.abi.spec import MAX_BLOCK_BYTES, CacheSpec, PoolSpec, WindowGroupSpec
from kvtier.connectors.store import Store, options_of
from kvtier.errors import InvalidArgument, KvtierError

DEFAULT_BLOCK_BYTES: Final = 1 << 20
_LENGTH_BYTES: Final = 8
_STAGED_BYTES: Final = 32 << 20
"""So many bytes of pieces lie between LMCache's buffers and kvtier at a time."""
_THREADS: Final = 4

_log = logging.getLogger("kvtier.connectors")

Completion: TypeAlias = tuple[int, bool, str, list[bool]]
"""Number of the operation, whether all of it went well, what was wrong, and one result a key."""


@dataclass(slots=True, frozen=True)
class _Piece:
    """``part`` of the ``length`` bytes of object number ``of``."""

    of: int
    key: bytes
    part: NDArray[np.uint8]
    length: int


class KvtierL2:
    """What LMCache's ``native_plugin`` asks for. Operations run in threads; LMCache polls :meth:`event_fd`."""

    def __init__(self, *, namespace: str = "", block_bytes: int = DEFAULT_BLOCK_BYTES, **settings: Any) -> None:
        """
        Args:
            namespace: keys of another one are never found. Name what LMCache's keys leave out, such as the dtype.
            block_bytes: of a piece. Objects whose size is a multiple of it waste nothing.
            settings: see ``docs/engines.md``.

        Raises: :class:`kvtier.KvtierError` for wrong settings where ``on_error`` is not ``continue``.
        """
        self._store: Store | None = None
        self._block_bytes: Final = block_bytes
        try:
            if not isinstance(block_bytes, int) or not 4096 <= block_bytes <= MAX_BLOCK_BYTES - _LENGTH_BYTES:
                raise InvalidArgument("block_bytes", block_bytes, f"4096 to {MAX_BLOCK_BYTES - _LENGTH_BYTES}")
            pool = PoolSpec.opaque(block_bytes + _LENGTH_BYTES)
            groups = (WindowGroupSpec(flat=True, pools=(pool,)),)
            identity = {"engine": "lmcache", "namespace": sha256(str(namespace).encode()).hexdigest()}
            self._store = Store(
                options_of(settings), CacheSpec("lmcache", "uint8", 1, groups=groups, identity=identity)
            )
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
        """Readable while there is something to drain."""
        return self._event

    def submit_batch_exists(self, keys: Sequence[str]) -> int:
        """An object counts as there if its first piece is: a load may still find that another piece has left."""
        return self._submit(len(keys), lambda store: store.find(0, [_key_of(key, 0) for key in keys]))

    def submit_batch_get(self, keys: Sequence[str], views: Sequence[memoryview]) -> int:
        """Fills each view, of the object's length."""
        return self._submit(len(keys), lambda store: self._copied(keys, views, partial(_load, store)))

    def submit_batch_set(self, keys: Sequence[str], views: Sequence[memoryview]) -> int:
        """Stores each view's bytes."""
        return self._submit(len(keys), lambda store: self._copied(keys, views, partial(_save, store)), whole=True)

    def submit_batch_delete(self, keys: Sequence[str]) -> int:
        """Forgets objects."""

        def drop(store: Store) -> list[bool]:
            pieces = (map(partial(_key_of, key), count()) for key in keys)
            return [store.drop(0, list(takewhile(partial(store.has, 0), each))) for each in pieces]

        return self._submit(len(keys), drop)

    def drain_completions(self) -> list[Completion]:
        """What has ended since the last call."""
        with self._lock:
            done, self._done = self._done, []
            if done:
                os.eventfd_read(self._event)
        return done

    def close(self) -> None:
        """Ends what is under way first."""
        self._threads.shutdown(cancel_futures=True)
        if self._store is not None:
            self._store.close()
        os.close(self._event)

    def _submit(self, objects: int, work: Callable[[Store], list[bool]], *, whole: bool = False) -> int:
        """``whole``: a store, which LMCache counts as a success only if every object was stored."""
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

    def _cut(self, keys: Sequence[str], views: Sequence[memoryview]) -> Iterator[_Piece]:
        for at, (key, view) in enumerate(zip(keys, views, strict=True)):
            whole = np.frombuffer(view, np.uint8)
            for number, start in enumerate(range(0, len(whole), self._block_bytes)):
                yield _Piece(at, _key_of(key, number), whole[start : start + self._block_bytes], len(whole))

    def _copied(
        self,
        keys: Sequence[str],
        views: Sequence[memoryview],
        copy: Callable[[Sequence[_Piece], NDArray[np.uint8]], list[bool]],
    ) -> list[bool]:
        """One result an object: whether each of its pieces was copied."""
        results, pieces = [True] * len(keys), list(self._cut(keys, views))
        step = max(1, _STAGED_BYTES // self._block_bytes)
        for first in range(0, len(pieces), step):
            some = pieces[first : first + step]
            rows = np.zeros((len(some), self._block_bytes + _LENGTH_BYTES), np.uint8)
            for piece, copied in zip(some, copy(some, rows), strict=True):
                results[piece.of] &= copied
        return results


def _save(store: Store, pieces: Sequence[_Piece], rows: NDArray[np.uint8]) -> list[bool]:
    for piece, row in zip(pieces, rows, strict=True):
        row[: len(piece.part)] = piece.part
        row[-_LENGTH_BYTES:].view("<u8")[:] = piece.length
    return store.save(0, [piece.key for piece in pieces], rows)


def _load(store: Store, pieces: Sequence[_Piece], rows: NDArray[np.uint8]) -> list[bool]:
    loaded = store.load(0, [piece.key for piece in pieces], list(rows))
    for at, (piece, row) in enumerate(zip(pieces, rows, strict=True)):
        loaded[at] = loaded[at] and int(row[-_LENGTH_BYTES:].view("<u8")[0]) == piece.length
        if loaded[at]:
            piece.part[:] = row[: len(piece.part)]
    return loaded


def _key_of(key: str, number: int) -> bytes:
    return sha256(f"{number}@{key}".encode()).digest()
