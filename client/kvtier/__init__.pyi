"""The public names and their modules: ``__init__.py`` reads this list to import a name at its first use."""
# ruff: noqa: I001

from kvtier.abi.event_hashes import event_hashes as event_hashes
from kvtier.abi.keys import MultimodalItem as MultimodalItem, Scope as Scope, chain_keys as chain_keys
from kvtier.abi.memory import empty as empty
from kvtier.abi.spec import CacheSpec as CacheSpec, PoolSpec as PoolSpec, WindowGroupSpec as WindowGroupSpec
from kvtier.bridge.trtllm import TrtllmEvents as TrtllmEvents
from kvtier.cache import Cache as Cache
from kvtier.chains import Prompt as Prompt
from kvtier.client import AsyncClient as AsyncClient, connect as connect
from kvtier.errors import (
    CallerError as CallerError,
    ClientClosed as ClientClosed,
    CursorCompacted as CursorCompacted,
    DaemonError as DaemonError,
    DaemonUnavailable as DaemonUnavailable,
    DamagedTransfer as DamagedTransfer,
    DataLoss as DataLoss,
    DeadlineExceeded as DeadlineExceeded,
    DeviceError as DeviceError,
    InvalidArgument as InvalidArgument,
    KvtierError as KvtierError,
    LeaseError as LeaseError,
    LeaseLost as LeaseLost,
    NotFound as NotFound,
    PermissionDenied as PermissionDenied,
    RetryableError as RetryableError,
    SpecMismatch as SpecMismatch,
    StaleRead as StaleRead,
    StillHeld as StillHeld,
    TierFull as TierFull,
    TierOffline as TierOffline,
    TooShort as TooShort,
)
from kvtier.events import (
    Disconnected as Disconnected,
    Event as Event,
    Gap as Gap,
    Heartbeat as Heartbeat,
    Reconnected as Reconnected,
    SnapshotEnd as SnapshotEnd,
    SnapshotSlice as SnapshotSlice,
    SnapshotStart as SnapshotStart,
)
from kvtier.explanation import Explanation as Explanation, RequestExplanation as RequestExplanation
from kvtier.groups import AcrossLease as AcrossLease
from kvtier.lease import ReadLease as ReadLease, WriteLease as WriteLease
from kvtier.mirror import (
    Mirror as Mirror,
    MirrorState as MirrorState,
    MirroredBlock as MirroredBlock,
    Mirrors as Mirrors,
    Standing as Standing,
    rank_mirrors as rank_mirrors,
)
from kvtier.retention import Retention as Retention, TokenRange as TokenRange
from kvtier.sync import Client as Client, SyncCache as SyncCache
from kvtier.transport import TlsFiles as TlsFiles
from kvtier.types import (
    BlockResult as BlockResult,
    CacheOptions as CacheOptions,
    Cause as Cause,
    Cursor as Cursor,
    EventType as EventType,
    LeaseTicket as LeaseTicket,
    ReadTicket as ReadTicket,
    Tier as Tier,
    WritePolicy as WritePolicy,
    WriteTicket as WriteTicket,
)
from kvtier.memory.planes import Planes as Planes
from kvtier.verbs import Hint as Hint, HintOutcome as HintOutcome, HintResult as HintResult
from kvtier.watch import Watch as Watch
from kvtier.wire import (
    Location as Location,
    Match as Match,
    ReadCounts as ReadCounts,
    TokenMatch as TokenMatch,
)
