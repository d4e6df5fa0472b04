"""Blocks whose bytes follow from their key, so that a wrong byte, or another block's, shows."""

import errno
import hashlib
import mmap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest

from kvtier.abi.spec import CacheSpec, PoolSpec, WindowGroupSpec
from kvtierd.core.ids import GroupId, Key, SlotId, Traits
from kvtierd.tiers.base import Bytes
from kvtierd.tiers.disk.batch import DiskWrite, Retirement
from kvtierd.tiers.disk.index import index_bytes
from kvtierd.tiers.disk.recovery import Recovery
from kvtierd.tiers.disk.root import DiskRoot
from kvtierd.tiers.disk.slab import SlabShape
from kvtierd.tiers.disk.store import DiskRead, DiskStore, create_files

Name = TypeVar("Name", bound=int | str)
GROUP = GroupId(0)
FINGERPRINT = hashlib.sha256(b"a specification").digest()
PARTS = (4096, 8192)
"""Two pools: one page and two."""
SHAPE_BYTES = sum(PARTS)


def key(name: int | str) -> Key:
    return Key(hashlib.sha256(str(name).encode()).digest())


def buffers(sizes: Sequence[int] = PARTS) -> list[Bytes]:
    """Page-aligned arrays, as the arenas hand them out."""
    return [np.frombuffer(mmap.mmap(-1, size), dtype=np.uint8) for size in sizes]


def parts_of(arrays: Iterable[Bytes]) -> list[memoryview]:
    return [array.data for array in arrays]


def payload(block: Key) -> list[Bytes]:
    """The only right bytes of a block."""
    rng = np.random.default_rng(np.frombuffer(block, dtype=np.uint64))
    parts = buffers()
    for part in parts:
        part[:] = rng.integers(0, 256, len(part), dtype=np.uint8)
    return parts


def block(
    name: int | str, slot: int, parent: int | str | None = None, group: GroupId = GROUP, traits: Traits | None = None
) -> DiskWrite:
    """A write of the block called ``name``."""
    above = None if parent is None else key(parent)
    return DiskWrite(group, SlotId(slot), key(name), above, traits or Traits(35), parts_of(payload(key(name))))


def retire(name: int | str, slot: int) -> Retirement:
    return GROUP, key(name), SlotId(slot)


def fails(*_: object) -> None:
    """In place of a system call."""
    raise OSError(errno.EIO, "Input/output error")


def watch(monkeypatch: pytest.MonkeyPatch, owner: object, name: str, steps: list[str]) -> None:
    """Notes each call of a function in ``steps``."""
    original = getattr(owner, name)

    def wrapper(*arguments: object) -> object:
        steps.append(name)
        return original(*arguments)

    monkeypatch.setattr(owner, name, wrapper)


def fetch(name: int | str, slot: int) -> DiskRead:
    return DiskRead(GROUP, SlotId(slot), key(name), parts_of(buffers()))


def holds_its_bytes(read: DiskRead) -> bool:
    return all(got == want.data for got, want in zip(read.parts, payload(read.key), strict=True))


def verdicts(store: DiskStore, places: Mapping[Name, int]) -> dict[Name, str]:
    """``ok``, ``failed`` or ``corrupt`` for each block, by name; ``wrong bytes`` if it passed and should not have."""
    reads = [fetch(name, slot) for name, slot in places.items()]
    report = store.read(reads)
    found: dict[Name, str] = {}
    for number, name in enumerate(places):
        if number in report.failed:
            found[name] = "failed"
        elif number in report.corrupt:
            found[name] = "corrupt"
        else:
            found[name] = "ok" if holds_its_bytes(reads[number]) else "wrong bytes"
    return found


def places(recovery: Recovery) -> dict[Key, SlotId]:
    return {record.key: record.slot for record in recovery.records[GROUP] if record.slot is not None}


def names(recovery: Recovery, candidates: Iterable[int | str]) -> list[int | str]:
    """The recovered blocks in their order, by name."""
    known = {key(name): name for name in candidates}
    return [known[record.key] for record in recovery.records[GROUP]]


def shapes(slots: int = 16) -> dict[GroupId, SlabShape]:
    return {GROUP: SlabShape(SHAPE_BYTES, slots)}


def new_store(directory: Path, slots: int = 16) -> DiskStore:
    directory.mkdir(exist_ok=True)
    create_files(directory, shapes(slots), index_bytes(slots))
    store = open_store(directory, slots)
    store.recover()
    return store


def open_store(directory: Path, slots: int = 16) -> DiskStore:
    """Not recovered yet."""
    return DiskStore.open(directory, shapes(slots), FINGERPRINT, index_bytes(slots))


@contextmanager
def reopened(store: DiskStore, directory: Path, slots: int = 16) -> Iterator[tuple[DiskStore, Recovery]]:
    store.close()
    again = open_store(directory, slots)
    try:
        yield again, again.recover()
    finally:
        again.close()


def spec(tokens_per_block: int = 16) -> CacheSpec:
    """One group of two pools; at 16 tokens 4 KiB and 8 KiB a block, which is ``PARTS``."""
    pools = (PoolSpec(1, 1, 64), PoolSpec(1, 2, 64))
    return CacheSpec("a model", "bfloat16", tokens_per_block, groups=(WindowGroupSpec(pools=pools),))


def open_root(path: Path) -> DiskRoot:
    return DiskRoot.open(path, floor_bytes=0)
