"""Which exception a daemon's answer becomes, and what it carries."""

from typing import Any

import grpc
import pytest
from google.protobuf import any_pb2
from google.rpc import status_pb2
from grpc.aio import AioRpcError, Metadata

from kvtier import errors
from kvtier.errors import error_of, fault_of, link_is_broken
from kvtier.v1 import common_pb2

Code = grpc.StatusCode


def failure(code: grpc.StatusCode, detail: common_pb2.ErrorDetail | None = None, message: str = "no") -> AioRpcError:
    """As gRPC raises it, with the detail packed as a daemon packs it."""
    trailing = Metadata()
    if detail is not None:
        packed = any_pb2.Any()
        packed.Pack(detail)
        status = status_pb2.Status(code=code.value[0], message=message, details=[packed])
        trailing.add("grpc-status-details-bin", status.SerializeToString())
    return AioRpcError(code, Metadata(), trailing, details=message)


def raised(code: grpc.StatusCode, reason: str = "", **fields: object) -> errors.KvtierError:
    detail = common_pb2.ErrorDetail(reason=reason, **fields) if reason else None  # type: ignore[arg-type]
    return error_of(fault_of(failure(code, detail)))


@pytest.mark.parametrize(
    ("code", "reason", "kind"),
    [
        (Code.RESOURCE_EXHAUSTED, "TIER_FULL", errors.TierFull),
        (Code.DEADLINE_EXCEEDED, "DEADLINE", errors.DeadlineExceeded),
        (Code.DEADLINE_EXCEEDED, "", errors.DeadlineExceeded),
        (Code.UNAVAILABLE, "", errors.DaemonUnavailable),
        (Code.UNAVAILABLE, "SHUTTING_DOWN", errors.DaemonUnavailable),
        (Code.UNAVAILABLE, "TIER_OFFLINE", errors.TierOffline),
        (Code.UNAVAILABLE, "TIER_FAILED", errors.TierOffline),
        (Code.NOT_FOUND, "UNKNOWN_CACHE", errors.NotFound),
        (Code.NOT_FOUND, "UNKNOWN_LEASE", errors.LeaseError),
        (Code.PERMISSION_DENIED, "FOREIGN_LEASE", errors.LeaseError),
        (Code.PERMISSION_DENIED, "PERMISSION_DENIED", errors.PermissionDenied),
        (Code.FAILED_PRECONDITION, "CACHE_NOT_OPENED", errors.CallerError),
        (Code.DATA_LOSS, "", errors.DataLoss),
        (Code.INTERNAL, "INTERNAL", errors.DaemonError),
        (Code.UNKNOWN, "", errors.DaemonError),
        (Code.UNIMPLEMENTED, "", errors.DaemonError),
    ],
)
def test_the_kind_follows_from_reason_and_status(
    code: grpc.StatusCode, reason: str, kind: type[errors.KvtierError]
) -> None:
    error = raised(code, reason)
    assert type(error) is kind
    assert error.reason == (reason or code.name)
    assert "no" in str(error)


def test_a_detail_that_makes_no_sense_leaves_the_status() -> None:
    full = raised(Code.RESOURCE_EXHAUSTED, "TIER_FULL", tier=99)
    assert isinstance(full, errors.TierFull) and full.tier is None
    garbage = AioRpcError(Code.NOT_FOUND, Metadata(), Metadata(("grpc-status-details-bin", b"\xff" * 9)), details="no")
    assert isinstance(error_of(fault_of(garbage)), errors.NotFound)


@pytest.mark.parametrize(
    ("code", "reason", "broken"),
    [
        (Code.UNAVAILABLE, "", True),
        (Code.UNAVAILABLE, "SHUTTING_DOWN", True),
        (Code.UNAVAILABLE, "TIER_OFFLINE", False),
        (Code.UNAUTHENTICATED, "UNKNOWN_SESSION", True),
        (Code.UNAUTHENTICATED, "ORPHANED_SESSION", True),
        (Code.CANCELLED, "CANCELLED", True),
        (Code.RESOURCE_EXHAUSTED, "TIER_FULL", False),
        (Code.DEADLINE_EXCEEDED, "", False),
        (Code.INVALID_ARGUMENT, "BAD_ARGUMENT", False),
    ],
)
def test_only_a_broken_way_to_the_daemon_is_worth_attaching_again(
    code: grpc.StatusCode, reason: str, broken: bool
) -> None:
    detail = common_pb2.ErrorDetail(reason=reason) if reason else None
    assert link_is_broken(fault_of(failure(code, detail))) is broken


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        (failure(Code.INTERNAL, message="Internal error from Core"), errors.DaemonUnavailable),
        (failure(Code.INTERNAL, message="a message that is no message"), errors.DaemonError),
        (
            failure(Code.INTERNAL, common_pb2.ErrorDetail(reason="INTERNAL"), "Internal error from Core"),
            errors.DaemonError,
        ),
    ],
)
def test_a_write_that_grpc_could_not_do_says_nothing_of_the_daemon(
    said: AioRpcError, kind: type[errors.KvtierError]
) -> None:
    """A client that attaches takes a DaemonError for the last word."""
    fault = fault_of(said)
    assert type(error_of(fault)) is kind
    assert link_is_broken(fault) is (kind is errors.DaemonUnavailable)


async def test_that_is_how_grpc_calls_it() -> None:
    """As its own ``write`` does where the message cannot be sent."""
    async with grpc.aio.insecure_channel("127.0.0.1:1") as channel:
        call: Any = channel.stream_unary("/kvtier.v1.Transfer/Put")()
        call._cython_call.set_internal_error("the stream broke")
        with pytest.raises(AioRpcError) as failed:
            await call
    assert link_is_broken(fault_of(failed.value))


def test_a_stranger_s_value_is_shortened_in_the_message() -> None:
    assert len(str(errors.InvalidArgument("name", "x" * 10_000, "short"))) < 200
