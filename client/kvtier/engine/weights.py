"""A digest of a model's weights, for the name of its cache: models with different weights have different caches.

A commit of the hub stands for its files. Files in a directory are sampled: a copy of a model has the digest of the
original, and a model that was trained further has another digest.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Final, Self

_WEIGHTS: Final = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf", ".engine", ".npz"})
_SETTINGS: Final = frozenset({".json", ".py"})
_MOST_SETTINGS_BYTES: Final = 1 << 20
"""A larger JSON file is a vocabulary or an index of weights."""
_MOST_HEADER_BYTES: Final = 100 << 20
_SAMPLE_BYTES: Final = 2048
_EVERY_BYTES: Final = 4 << 20
_THREADS: Final = 8


@dataclass(slots=True, frozen=True)
class Weights:
    """``name``: the model's name, without its parent directories. ``source``: the commit or the files of the digest.

    Without a source the weights were not found, and models of the same path and settings have the same digest.
    """

    name: str
    digest: str
    source: str | None

    @property
    def told(self) -> str:
        """The source, for a line of the log."""
        return self.source or "the model's path alone"

    def log(self, log: logging.Logger) -> None:
        if self.source is not None:
            log.info("kvtier: the cache's name has the weights of %s from %s", self.name, self.source)
            return
        limit = "set weights_version, or other weights under this name share its cache"
        log.warning("kvtier: the weights of %s were not found: %s", self.name, limit)


def weights_of(
    model: str, revision: str | None = None, *, commit: str | None = None, version: str | None = None
) -> Weights:
    """Finds the weights of a model. Raises nothing: unreadable weights are missing weights.

    Args:
        model: a directory, a file, or a name on the hub.
        revision: a revision on the hub; None = main.
        commit: the commit on the hub, if the engine knows it.
        version: the user's own name for the weights, which replaces the search.
    """
    name, path = model, Path(model)
    try:
        path = path.resolve() if path.exists() else path
        name = path.name if path.exists() else model
        if version is not None:
            return Weights(name, _text_digest("version", version), f"weights_version {version!r}")
        found = _Found.of(model, revision, commit)
        if found.source is not None:
            return Weights(name, found.digest, found.source)
        digest = found.digest  # of the settings alone
    except (OSError, ValueError):
        digest = ""
    return Weights(name, _text_digest("unseen", str(path), str(revision), digest), None)


class Adapters:
    """Digests of LoRA adapters by their directories.

    A directory whose files change is refused from then on: the engine may have the old or the new files, and its own
    cache does not distinguish their pages.
    """

    def __init__(self, log: logging.Logger) -> None:
        self._log: Final = log
        self._known: Final[dict[str, tuple[object, bytes | None]]] = {}

    def digest(self, path: str) -> bytes | None:
        """Returns the digest of an adapter's files, or None for an adapter that is refused."""
        before, digest = self._known.get(path, (None, None))
        stamp: object = "unreadable"
        with suppress(OSError, ValueError):
            found = _Found.of(path, None, None)
            stamp = found.stamp()
            if stamp == before:
                return digest
            digest = bytes.fromhex(found.digest) if found.source and found.files and before is None else None
        if digest is None:
            self._log.warning("kvtier leaves adapter %s alone: its files are missing or have changed", path)
        self._known[path] = stamp, digest
        return digest


@dataclass(slots=True, frozen=True)
class _Found:
    """The files of a model, or its commit on the hub."""

    model: str
    commit: str | None
    files: Sequence[Path]

    @classmethod
    def of(cls, model: str, revision: str | None, commit: str | None) -> Self:
        path = Path(model)
        if not path.exists():
            return cls(model, commit or _cached_commit(model, revision), ())
        there = sorted(path.iterdir()) if path.is_dir() else [path]
        return cls(model, None, [file for file in there if file.is_file() and _matters(file)])

    @property
    def source(self) -> str | None:
        """The origin of the digest, in words; None if there are no weights."""
        if self.commit is not None:
            return f"commit {self.commit}"
        weights = [file for file in self.files if file.suffix in _WEIGHTS]
        nbytes = sum(file.stat().st_size for file in weights)
        return f"samples of {len(weights)} files with {nbytes} bytes in {self.model}" if weights else None

    @property
    def digest(self) -> str:
        """Covers the names, sizes and samples of the files."""
        if self.commit is not None:
            return _text_digest("commit", self.commit)
        with ThreadPoolExecutor(_THREADS) as threads:
            return sha256(b"".join(threads.map(_sampled, self.files))).hexdigest()

    def stamp(self) -> object:
        """Returns a value that changes with the files, without reading them."""
        seen = [(file.name, file.stat()) for file in self.files]
        return self.commit, [(name, each.st_size, each.st_mtime_ns, each.st_ino) for name, each in seen]


def _matters(file: Path) -> bool:
    """Returns whether a file decides the bytes that a model computes: weights, settings, code."""
    small = file.suffix in _SETTINGS and file.stat().st_size <= _MOST_SETTINGS_BYTES
    return small or file.suffix in _WEIGHTS


def _text_digest(*texts: str) -> str:
    return sha256(json.dumps(texts).encode()).hexdigest()


def _sampled(file: Path) -> bytes:
    digest = sha256(f"{file.name} {file.stat().st_size} ".encode())
    with file.open("rb", buffering=0) as opened:
        fd = opened.fileno()
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        if file.suffix in _SETTINGS:
            digest.update(opened.read())
            return digest.digest()
        size = os.fstat(fd).st_size
        places = {*range(0, size, _EVERY_BYTES), max(0, size - _SAMPLE_BYTES)}
        if file.suffix == ".safetensors":
            places.update(_tensors(fd, size))
        for place in sorted(place for place in places if 0 <= place < size):
            digest.update(os.pread(fd, _SAMPLE_BYTES, place))
    return digest.digest()


def _tensors(fd: int, size: int) -> Iterator[int]:
    """Yields an offset in the middle of each tensor. Format: https://github.com/huggingface/safetensors#format."""
    start = 8 + int.from_bytes(os.pread(fd, 8, 0), "little")
    try:
        header = json.loads(os.pread(fd, start - 8, 8)) if start <= min(size, _MOST_HEADER_BYTES) else {}
        for name, tensor in header.items():
            if name != "__metadata__":
                first, end = tensor["data_offsets"]
                yield start + max(first, (first + end - _SAMPLE_BYTES) // 2)
    except (ValueError, TypeError, KeyError, AttributeError):
        return  # no safetensors file: the other samples identify it


def _cached_commit(model: str, revision: str | None) -> str | None:
    """Returns the commit of a revision in this host's cache of the hub, or None."""
    try:
        hub = importlib.import_module("huggingface_hub")
        snapshot = Path(hub.snapshot_download(model, revision=revision, local_files_only=True))
    except (ImportError, OSError, ValueError):  # the hub's own errors are subclasses
        return None
    return snapshot.name if snapshot.parent.name == "snapshots" else None
