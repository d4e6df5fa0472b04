"""The disk tier: preallocated slabs moved by direct I/O, and an LMDB index that says what they hold.

A :class:`DiskRoot` is the directory, a :class:`DiskStore` one cache in it. Everything blocks: call it from threads.
"""

from kvtierd.tiers.disk.root import DiskRoot, StoredCache
from kvtierd.tiers.disk.store import DiskStore
from kvtierd.tiers.disk.values import (
    Begun,
    DiskRead,
    DiskRecord,
    DiskWrite,
    ReadReport,
    Recovery,
    Restatement,
    Retirement,
    SlabShape,
)

__all__ = [
    "Begun",
    "DiskRead",
    "DiskRecord",
    "DiskRoot",
    "DiskStore",
    "DiskWrite",
    "ReadReport",
    "Recovery",
    "Restatement",
    "Retirement",
    "SlabShape",
    "StoredCache",
]
