import grpc
import pytest
from google.rpc import status_pb2

from kvtier.abi.spec import SpecError
from kvtierd.core import errors as core
from kvtierd.core.ids import CacheId, GroupId, LeaseId, SessionId, TicketId, Tier
from kvtierd.core.outcome import Refusal, RefusalReason, SlotHolder
from kvtierd.mover.executor import ShuttingDown, TicketRefused, UnknownCache
from kvtierd.service.errors import MAX_HOLDERS, Translator
from kvtierd.tiers.base import TierConfigError, TierIOError

Code = grpc.StatusCode
translate = Translator(lambda session: (1000 + session, "x" * 500))


def refusal(reason: RefusalReason) -> TicketRefused:
    return TicketRefused(
        Refusal(TicketId(1), reason, Tier.HOST, wanted=5, free=2, holders=(SlotHolder(SessionId(3), 7),))
    )


@pytest.mark.parametrize(
    ("error", "code", "reason"),
    [
        (core.BadArgument("count", 0, "1 or more"), Code.INVALID_ARGUMENT, "BAD_ARGUMENT"),
        (core.UnknownGroup(GroupId(9)), Code.INVALID_ARGUMENT, "BAD_ARGUMENT"),
        (SpecError("dtype", "int4", "one of these"), Code.INVALID_ARGUMENT, "BAD_ARGUMENT"),
        (core.UnknownLease(LeaseId(1)), Code.NOT_FOUND, "UNKNOWN_LEASE"),
        (core.ForeignLease(LeaseId(1)), Code.PERMISSION_DENIED, "FOREIGN_LEASE"),
        (core.TierOutOfService(Tier.DISK), Code.UNAVAILABLE, "TIER_OFFLINE"),
        (refusal(RefusalReason.TIER_FULL), Code.RESOURCE_EXHAUSTED, "TIER_FULL"),
        (refusal(RefusalReason.DEADLINE), Code.DEADLINE_EXCEEDED, "DEADLINE"),
        (refusal(RefusalReason.TIER_OFFLINE), Code.UNAVAILABLE, "TIER_OFFLINE"),
        (refusal(RefusalReason.CANCELLED), Code.CANCELLED, "CANCELLED"),
        (refusal(RefusalReason.TOO_SHORT), Code.FAILED_PRECONDITION, "TOO_SHORT"),
        (UnknownCache(CacheId(4)), Code.NOT_FOUND, "UNKNOWN_CACHE"),
        (ShuttingDown(), Code.UNAVAILABLE, "SHUTTING_DOWN"),
        (TierConfigError("host", 1, "no memory"), Code.RESOURCE_EXHAUSTED, "NO_MEMORY"),
        (TierIOError(5, "disk died"), Code.UNAVAILABLE, "TIER_FAILED"),
    ],
)
def test_each_error_has_a_status_and_a_reason(error: Exception, code: grpc.StatusCode, reason: str) -> None:
    refused = translate(error)
    assert (refused.code, refused.detail.reason) == (code, reason)
    status = status_pb2.Status.FromString(refused.trailing_metadata()[0][1])
    assert (status.code, status.message) == (code.value[0], refused.message)


def test_every_reason_of_the_core_has_a_status() -> None:
    assert all(translate(refusal(reason)).code is not Code.INTERNAL for reason in RefusalReason)


def test_many_holders_and_long_commands_fit_into_the_metadata() -> None:
    holders = tuple(SlotHolder(SessionId(n), n) for n in range(1000))
    refused = translate(TicketRefused(Refusal(TicketId(1), RefusalReason.TIER_FULL, Tier.HOST, 5, 2, holders)))
    assert [holder.slots for holder in refused.detail.holders] == list(range(999, 999 - MAX_HOLDERS, -1))
    assert len(refused.trailing_metadata()[0][1]) < 8192


@pytest.mark.limit(20)
def test_an_error_that_comes_from_itself_is_translated_as_any_other() -> None:
    """One reason for many calls, raised again while the refusal that it led to is handled."""
    reason = core.TierOutOfService(Tier.DISK)
    refusal = RuntimeError("made of it")
    refusal.__cause__ = reason
    reason.__context__ = refusal
    assert translate(reason).detail.reason == "TIER_OFFLINE"
