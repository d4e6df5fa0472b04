# ruff: noqa: I001
from kvtier.sync.cache import SyncAcrossGroups as SyncAcrossGroups, SyncAcrossLease as SyncAcrossLease
from kvtier.sync.cache import SyncCache as SyncCache, SyncLeases as SyncLeases
from kvtier.sync.cache import SyncReadLease as SyncReadLease, SyncWriteLease as SyncWriteLease
from kvtier.sync.client import Client as Client, SyncMirror as SyncMirror, SyncWatch as SyncWatch
