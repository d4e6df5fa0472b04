"""From a failed RPC to an exception of :mod:`kvtier.errors`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final

import grpc
from google.rpc import status_pb2
from grpc.aio import AioRpcError

from kvtier import errors
from kvtier.types import Tier
from kvtier.v1 import blocks_pb2, common_pb2

DETAILS_KEY: Final = "grpc-status-details-bin"

_FAILED_WRITE: Final = "Internal error from Core"
"""With INTERNAL, what gRPC itself makes of a message that it could not send, whatever ended the stream meanwhile."""


@dataclass(slots=True, frozen=True)
class Fault:
    """What the daemon said: status, message and, where it came along, the detail."""

    code: grpc.StatusCode
    message: str
    detail: common_pb2.ErrorDetail

    @property
    def reason(self) -> str:
        return self.detail.reason or self.code.name


def fault_of(error: AioRpcError) -> Fault:
    """Reads the ``kvtier.v1.ErrorDetail`` of a failed call; an empty one where the failure is gRPC's own."""
    detail = common_pb2.ErrorDetail()
    for key, value in error.trailing_metadata() or ():
        if key == DETAILS_KEY:
            status = status_pb2.Status.FromString(value if isinstance(value, bytes) else value.encode())
            for packed in status.details:
                if packed.Is(common_pb2.ErrorDetail.DESCRIPTOR):
                    packed.Unpack(detail)
    fault = Fault(error.code(), error.details() or "", detail)
    if fault.code is grpc.StatusCode.INTERNAL and not detail.reason and fault.message == _FAILED_WRITE:
        return replace(fault, code=grpc.StatusCode.UNAVAILABLE)
    return fault


def error_of(fault: Fault) -> errors.KvtierError:
    """The exception for a fault: by its reason where that says more than the status, else by its status."""
    make = _BY_REASON.get(fault.reason) or _BY_CODE.get(fault.code, _plain(errors.DaemonError))
    return make(fault)


def chain_error(chain: blocks_pb2.AcquiredChain, min_blocks: int) -> errors.KvtierError:
    """Of a chain that was refused; the reasons are those of a whole call."""
    wanted = max(min_blocks, 1)  # where something is stored, none of it is refused, too
    message = f"{chain.matched} blocks of the chain are stored, at least {wanted} wanted: {chain.refusal}"
    if chain.refusal == "TIER_FULL":
        return tier_full(message, chain.detail)
    if chain.refusal == "TOO_SHORT":
        return errors.TooShort(message, matched=chain.matched, reason=chain.refusal)
    return _OF_CHAINS.get(chain.refusal, errors.DaemonError)(message, reason=chain.refusal)


_OF_CHAINS: Final[Mapping[str, type[errors.KvtierError]]] = {
    "DEADLINE": errors.DeadlineExceeded,
    "TIER_OFFLINE": errors.TierOffline,
    "CANCELLED": errors.DaemonUnavailable,
}


def link_is_broken(fault: Fault) -> bool:
    """Whether the way to the daemon failed, rather than the daemon having answered."""
    if fault.code is grpc.StatusCode.UNAVAILABLE:
        return fault.reason not in _TIER_REASONS
    return fault.code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.CANCELLED)


_TIER_REASONS: Final = frozenset({"TIER_OFFLINE", "TIER_FAILED"})
"""UNAVAILABLE that speaks of a tier: the daemon itself is well."""

_Make = Callable[[Fault], errors.KvtierError]


def _plain(kind: type[errors.KvtierError]) -> _Make:
    return lambda fault: kind(fault.message or fault.code.name, reason=fault.reason)


def _invalid_argument(fault: Fault) -> errors.KvtierError:
    detail = fault.detail
    if not detail.field:
        return errors.CallerError(fault.message, reason=fault.reason)
    kind = errors.SpecMismatch if fault.reason == "SPEC_MISMATCH" else errors.InvalidArgument
    return kind(detail.field, detail.value, detail.limit, reason=fault.reason)


def tier_full(message: str, detail: common_pb2.ErrorDetail) -> errors.TierFull:
    """From what the daemon says of a full tier, of a call or of one chain in it."""
    return errors.TierFull(
        message,
        tier=Tier(detail.tier - 1) if detail.tier else None,
        wanted=detail.wanted,
        free=detail.free,
        holders=_holders(detail),
        reason=detail.reason,
    )


def _holders(detail: common_pb2.ErrorDetail) -> tuple[errors.Holder, ...]:
    return tuple(errors.Holder(h.session_id, h.pid, h.command, h.slots) for h in detail.holders)


def _still_held(fault: Fault) -> errors.StillHeld:
    return errors.StillHeld(fault.message, holders=_holders(fault.detail), reason=fault.reason)


def _compacted(fault: Fault) -> errors.KvtierError:
    oldest = int(fault.detail.limit) if fault.detail.limit.isdigit() else 0
    return errors.CursorCompacted(fault.message, oldest=oldest, reason=fault.reason)


_BY_REASON: Final[Mapping[str, _Make]] = {
    "CHECKSUM_MISMATCH": _plain(errors.DamagedTransfer),
    "UNKNOWN_LEASE": _plain(errors.LeaseError),
    "FOREIGN_LEASE": _plain(errors.LeaseError),
    "STILL_HELD": _still_held,
    "TIER_OFFLINE": _plain(errors.TierOffline),
    "TIER_FAILED": _plain(errors.TierOffline),
    "TOO_MANY_OF_IDENTITY": _plain(errors.RetryableError),
}

_BY_CODE: Final[Mapping[grpc.StatusCode, _Make]] = {
    grpc.StatusCode.INVALID_ARGUMENT: _invalid_argument,
    grpc.StatusCode.RESOURCE_EXHAUSTED: lambda fault: tier_full(fault.message, fault.detail),
    grpc.StatusCode.DEADLINE_EXCEEDED: _plain(errors.DeadlineExceeded),
    grpc.StatusCode.UNAVAILABLE: _plain(errors.DaemonUnavailable),
    grpc.StatusCode.CANCELLED: _plain(errors.DaemonUnavailable),
    grpc.StatusCode.NOT_FOUND: _plain(errors.NotFound),
    grpc.StatusCode.FAILED_PRECONDITION: _plain(errors.CallerError),
    grpc.StatusCode.PERMISSION_DENIED: _plain(errors.PermissionDenied),
    grpc.StatusCode.UNAUTHENTICATED: _plain(errors.PermissionDenied),
    grpc.StatusCode.OUT_OF_RANGE: _compacted,
    grpc.StatusCode.DATA_LOSS: _plain(errors.DataLoss),
}
