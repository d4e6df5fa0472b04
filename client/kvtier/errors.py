"""Errors, classed by the caller's remedy.

``RetryableError``: the call is right, and can succeed later. ``CallerError``: the call is wrong and stays wrong.
``DeviceError``: this process's GPU failed the call. ``DataLoss``: bytes are gone. ``DaemonError``: a bug of kvtier,
please report it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import Final, TypeVar

import grpc
from google.protobuf.message import DecodeError
from google.rpc import status_pb2
from grpc.aio import AioRpcError

from kvtier.abi.spec import CallerError as CallerError  # noqa: PLC0414  re-exported
from kvtier.abi.spec import InvalidArgument as InvalidArgument  # noqa: PLC0414
from kvtier.abi.spec import KvtierError as KvtierError  # noqa: PLC0414
from kvtier.types import Tier, clean
from kvtier.v1 import blocks_pb2, common_pb2

N = TypeVar("N", bound=float)


class RetryableError(KvtierError):
    """The same call can succeed later."""


@dataclass(slots=True, frozen=True)
class Holder:
    """A session that holds slots of a full tier."""

    session_id: int
    pid: int
    command: str
    slots: int


class TierFull(RetryableError):
    """Evicting all slots that are not held would not make room: ``wanted`` slots of ``tier``, ``free`` of them
    available. The message names the ``holders``."""

    def __init__(
        self, message: str, *, tier: Tier | None, wanted: int, free: int, holders: tuple[Holder, ...], reason: str
    ) -> None:
        held = ", ".join(f"pid {each.pid} {clean(each.command)} ({each.slots} slots)" for each in holders)
        super().__init__(f"{message}; held by {held}" if held else message, reason=reason)
        self.tier = tier
        self.wanted = wanted
        self.free = free
        self.holders = holders


class DeadlineExceeded(RetryableError):
    """The call's time ran out. The client releases any leases that the daemon granted meanwhile."""


class TierOffline(RetryableError):
    """The tier's device failed; the daemon goes on without it and takes it back when it recovers."""


class DaemonUnavailable(RetryableError):
    """No daemon answers at the address, or it went away during a call that cannot be repeated safely."""


class StaleRead(RetryableError):
    """A slot's generation changed while its bytes were copied: the copy is not the block."""


class DamagedTransfer(RetryableError):
    """Bytes were damaged on the way. A put stored none of them; the targets of a get do not hold the blocks."""


def require_within(field: str, value: N, low: float, high: float, limit: str = "") -> N:
    """Returns the value. Raises :class:`InvalidArgument` for a number below ``low`` or above ``high``, and for a value
    that is no number, or no whole number where ``high`` is an ``int``."""
    limit = limit or f"{low} to {high}"
    if not isinstance(value, Integral if isinstance(high, int) else Real) or isinstance(value, bool):
        raise InvalidArgument(field, repr(value), f"{limit}, as a {'whole ' * isinstance(high, int)}number")
    if not low <= value <= high:
        raise InvalidArgument(field, value, limit)
    return value


def require_kind(field: str, value: object, *kinds: type) -> None:
    """Raises :class:`InvalidArgument` for a value that is of none of these types."""
    if not isinstance(value, kinds):
        raise InvalidArgument(field, repr(value), f"of type {' or '.join(kind.__name__ for kind in kinds)}")


class SpecMismatch(InvalidArgument):
    """The cache is open, or remembered on disk, with another specification."""


class NotFound(CallerError):
    """The cache, group or session does not exist."""


class TooShort(NotFound):
    """Less than ``min_blocks`` of the chain is stored: ``matched`` blocks."""

    def __init__(self, message: str, *, matched: int, reason: str) -> None:
        super().__init__(message, reason=reason)
        self.matched = matched


class StillHeld(CallerError):
    """A reset is refused while blocks are leased or pinned. ``holders``: sessions with leases, most slots first."""

    def __init__(self, message: str, *, holders: tuple[Holder, ...], reason: str) -> None:
        super().__init__(message, reason=reason)
        self.holders = holders


class LeaseError(CallerError):
    """The lease cannot be used for this."""


class LeaseLost(LeaseError):
    """The lease ended with its session: the daemon restarted, or an operator kicked the session. Other sessions own the
    slots now. Acquire again."""


class PermissionDenied(CallerError):
    """This client lacks a right, or may not talk to the daemon."""


class CursorCompacted(CallerError):
    """The events after the cursor are no longer held; ``oldest`` is the first id that is."""

    def __init__(self, message: str, *, oldest: int, reason: str) -> None:
        super().__init__(message, reason=reason)
        self.oldest = oldest


class ClientClosed(CallerError):
    """The client, or the lease's cache, is closed."""


class DeviceError(KvtierError):
    """A CUDA call failed in this process. The request was not sent to the daemon, and leases stay held.

    ``call`` is the entry point, ``code`` the ``CUresult``. Reason DEVICE_LOST: this process cannot use its GPU any more
    and must be restarted; the daemon has its slots back once the process ends. DEVICE_FAILED: any other failure, as in
    the message.
    """

    def __init__(self, message: str, *, call: str, code: int, reason: str) -> None:
        super().__init__(message, reason=reason)
        self.call = call
        self.code = code


class DataLoss(KvtierError):
    """Bytes that the daemon had accepted are gone or damaged."""


class DaemonError(KvtierError):
    """A bug of kvtier: an invalid answer of the daemon, or a failure inside it."""


DETAILS_KEY: Final = "grpc-status-details-bin"

FAILED_WRITE: Final = "Internal error from Core"
"""gRPC's message, with INTERNAL, for a message that could not be sent, whatever ended the stream."""


@dataclass(slots=True, frozen=True)
class Fault:
    """The daemon's error: status, message and detail, which may be empty."""

    code: grpc.StatusCode
    message: str
    detail: common_pb2.ErrorDetail

    @property
    def reason(self) -> str:
        return self.detail.reason or self.code.name


def fault_of(error: AioRpcError) -> Fault:
    """Reads the ``kvtier.v1.ErrorDetail`` of a failed call; the detail is empty if gRPC itself failed."""
    detail = common_pb2.ErrorDetail()
    for key, value in error.trailing_metadata() or ():
        with suppress(DecodeError):  # only the status is known then
            if key == DETAILS_KEY:
                status = status_pb2.Status.FromString(value if isinstance(value, bytes) else value.encode())
                for packed in status.details:
                    if packed.Is(common_pb2.ErrorDetail.DESCRIPTOR):
                        packed.Unpack(detail)
    fault = Fault(error.code(), error.details() or "", detail)
    if fault.code is grpc.StatusCode.INTERNAL and not detail.reason and fault.message == FAILED_WRITE:
        return replace(fault, code=grpc.StatusCode.UNAVAILABLE)
    return fault


def error_of(fault: Fault) -> KvtierError:
    """The exception for a fault, chosen by its reason if that is known, else by its status."""
    name = fault.reason if fault.reason in KINDS or fault.reason in _DETAILED else fault.code.name
    if name in _DETAILED:
        return _DETAILED[name](fault)
    return KINDS.get(name, DaemonError)(fault.message or fault.code.name, reason=fault.reason)


def chain_error(chain: blocks_pb2.AcquiredChain, min_blocks: int) -> KvtierError:
    """The error of a refused chain; reasons are the same as for a whole call."""
    wanted = max(min_blocks, 1)  # a chain with stored blocks is also refused if no block fits
    message = f"{chain.matched} blocks of the chain are stored, at least {wanted} wanted: {chain.refusal}"
    if chain.refusal == "TIER_FULL":
        return tier_full(message, chain.detail)
    if chain.refusal == "TOO_SHORT":
        return TooShort(message, matched=chain.matched, reason=chain.refusal)
    return KINDS.get(chain.refusal, DaemonError)(message, reason=chain.refusal)


def link_is_broken(fault: Fault) -> bool:
    """Whether the connection to the daemon failed, as opposed to an answer from the daemon."""
    if fault.code is grpc.StatusCode.UNAVAILABLE:
        return fault.reason not in _TIER_REASONS
    return fault.code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.CANCELLED)


_TIER_REASONS: Final = frozenset({"TIER_OFFLINE", "TIER_FAILED"})
"""Reasons of UNAVAILABLE that concern a tier: the daemon itself is well."""


def _invalid_argument(fault: Fault) -> KvtierError:
    detail = fault.detail
    if not detail.field:
        return CallerError(fault.message, reason=fault.reason)
    kind = SpecMismatch if fault.reason == "SPEC_MISMATCH" else InvalidArgument
    return kind(detail.field, detail.value, detail.limit, reason=fault.reason)


_TIERS: Final[Mapping[int, Tier]] = {tier + 1: tier for tier in Tier}


def tier_full(message: str, detail: common_pb2.ErrorDetail) -> TierFull:
    """The error for a full tier, from the detail of a call or of one chain in it."""
    return TierFull(
        message,
        tier=_TIERS.get(detail.tier),
        wanted=detail.wanted,
        free=detail.free,
        holders=_holders(detail),
        reason=detail.reason,
    )


def _holders(detail: common_pb2.ErrorDetail) -> tuple[Holder, ...]:
    return tuple(Holder(h.session_id, h.pid, h.command, h.slots) for h in detail.holders)


def _compacted(fault: Fault) -> KvtierError:
    oldest = int(fault.detail.limit) if fault.detail.limit.isdigit() else 0
    return CursorCompacted(fault.message, oldest=oldest, reason=fault.reason)


def _exhausted(fault: Fault) -> KvtierError:
    """Of a tier, or without a reason one of gRPC's own limits on calls or message size."""
    if not fault.detail.reason:
        return RetryableError(fault.message or fault.code.name, reason=fault.reason)
    return tier_full(fault.message, fault.detail)


_DETAILED: Final[Mapping[str, Callable[[Fault], KvtierError]]] = {
    "INVALID_ARGUMENT": _invalid_argument,
    "OUT_OF_RANGE": _compacted,
    "RESOURCE_EXHAUSTED": _exhausted,
    "STILL_HELD": lambda fault: StillHeld(fault.message, holders=_holders(fault.detail), reason=fault.reason),
}

KINDS: Final[Mapping[str, type[KvtierError]]] = {
    "CHECKSUM_MISMATCH": DamagedTransfer,
    "DEADLINE": DeadlineExceeded,
    "FOREIGN_LEASE": LeaseError,
    "NO_DESCRIPTOR": RetryableError,
    "TIER_FAILED": TierOffline,
    "TIER_OFFLINE": TierOffline,
    "TOO_MANY_CALLS": RetryableError,
    "TOO_MANY_DESCRIPTORS": RetryableError,
    "TOO_MANY_OF_IDENTITY": RetryableError,
    "TOO_MANY_SESSIONS": RetryableError,
    "TOO_MANY_WATCHES": RetryableError,
    "UNKNOWN_CACHE": NotFound,
    "UNKNOWN_LEASE": LeaseError,
    # names of statuses
    "CANCELLED": DaemonUnavailable,
    "DATA_LOSS": DataLoss,
    "DEADLINE_EXCEEDED": DeadlineExceeded,
    "FAILED_PRECONDITION": CallerError,
    "INTERNAL": DaemonError,
    "NOT_FOUND": NotFound,
    "PERMISSION_DENIED": PermissionDenied,
    "UNAUTHENTICATED": PermissionDenied,
    "UNAVAILABLE": DaemonUnavailable,
}
"""The exception of a reason, or else of a status, wherever the daemon tells it."""
