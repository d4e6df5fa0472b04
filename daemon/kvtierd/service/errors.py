"""Errors on the wire: google.rpc.Status in the trailing metadata, with one ``kvtier.v1.ErrorDetail``.

Every refusal is an exception. :class:`Translator` turns it into a :class:`CallRefused`. An exception that its table
lacks is a bug of the daemon: INTERNAL, and a log line.
"""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Callable, Mapping
from typing import Any, Final

import grpc
from google.protobuf import any_pb2
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass
from google.rpc import status_pb2

from kvtier.abi.spec import InvalidArgument
from kvtier.v1 import common_pb2
from kvtierd.core.errors import BadArgument, ForeignLease, ResetRefused, TierOutOfService, UnknownGroup, UnknownLease
from kvtierd.core.ids import SessionId
from kvtierd.core.outcome import Refusal, RefusalReason, SlotHolder
from kvtierd.mover.executor import MoverError, ShuttingDown, TicketRefused, UnknownCache
from kvtierd.service import wire
from kvtierd.tiers.base import TierConfigError, TierError
from kvtierd.tiers.remote.base import RemoteError, RemoteRefused

STATUS_KEY: Final = "grpc-status-details-bin"

MAX_SHOWN: Final = 80
MAX_HOLDERS: Final = 16
"""Holders named in a refusal, most slots first: trailing metadata has room for about 8 KiB."""

_log = logging.getLogger(__name__)


class CallRefused(Exception):
    """The status that ends a call. ``detail.reason`` is stable and machine readable."""

    def __init__(self, code: grpc.StatusCode, message: str, detail: common_pb2.ErrorDetail) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.detail = detail

    def status(self) -> bytes:
        """A serialised google.rpc.Status."""
        packed = any_pb2.Any()
        packed.Pack(self.detail)
        number: int = self.code.value[0]
        serialised: bytes = status_pb2.Status(code=number, message=self.message, details=[packed]).SerializeToString()
        return serialised

    def trailing_metadata(self) -> tuple[tuple[str, bytes], ...]:
        return ((STATUS_KEY, self.status()),)


def refused(code: grpc.StatusCode, reason: str, message: str, **detail: Any) -> CallRefused:
    """``detail``: further fields of the detail."""
    return CallRefused(code, message, common_pb2.ErrorDetail(reason=reason, **detail))


def bad_argument(field: str, value: object, limit: str, reason: str = "BAD_ARGUMENT") -> CallRefused:
    """INVALID_ARGUMENT. ``limit`` completes the sentence "must be …"."""
    value = shown(value)
    message = f"{field} = {value}: must be {limit}"
    return refused(grpc.StatusCode.INVALID_ARGUMENT, reason, message, field=field, value=value, limit=limit)


def unknown(field: str, value: object, what: str = "cache", reason: str = "UNKNOWN_CACHE") -> CallRefused:
    """NOT_FOUND."""
    return refused(grpc.StatusCode.NOT_FOUND, reason, f"no such {what}: {value}", field=field, value=str(value))


def cache_not_opened(cache_id: int) -> CallRefused:
    code, message = grpc.StatusCode.FAILED_PRECONDITION, f"cache_id = {cache_id}: this session has not opened the cache"
    return refused(code, "CACHE_NOT_OPENED", message, field="cache_id", value=str(cache_id))


def shutting_down() -> CallRefused:
    return refused(grpc.StatusCode.UNAVAILABLE, "SHUTTING_DOWN", "the daemon stops")


def shown(value: object) -> str:
    """A client's value, cut to the length of a message."""
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 3]}..."


def parser(method: MethodDescriptor) -> Callable[[bytes], Any]:
    """Returns a parser of the method's requests, which raises INVALID_ARGUMENT for malformed bytes."""
    cls = GetMessageClass(method.input_type)

    def parse(raw: bytes) -> Any:
        try:
            return cls.FromString(raw)
        except DecodeError as error:
            raise bad_argument("request", f"{len(raw)} bytes", f"a serialised {method.input_type.full_name}") from error

    return parse


class Translator:
    """Turns any exception into a :class:`CallRefused`. ``owner_of``: pid and command of a session."""

    def __init__(self, owner_of: Callable[[SessionId], tuple[int, str]]) -> None:
        self._owner_of = owner_of
        self._table: Mapping[type[Exception], Callable[[Any], CallRefused]] = {
            CallRefused: lambda error: error,
            BadArgument: lambda error: bad_argument(error.field, error.value, error.limit),
            InvalidArgument: lambda error: bad_argument(error.field, error.value, error.limit),
            TierConfigError: lambda error: refused(grpc.StatusCode.RESOURCE_EXHAUSTED, "NO_MEMORY", str(error)),
            UnknownGroup: lambda error: bad_argument("group", error.group, "a window group of the cache"),
            UnknownLease: lambda error: refused(grpc.StatusCode.NOT_FOUND, "UNKNOWN_LEASE", str(error)),
            ForeignLease: lambda error: refused(grpc.StatusCode.PERMISSION_DENIED, "FOREIGN_LEASE", str(error)),
            TierOutOfService: lambda error: refused(grpc.StatusCode.UNAVAILABLE, "TIER_OFFLINE", str(error)),
            ResetRefused: self._still_held,
            TierError: lambda error: refused(grpc.StatusCode.UNAVAILABLE, "TIER_FAILED", str(error)),
            RemoteRefused: lambda error: refused(grpc.StatusCode.FAILED_PRECONDITION, "REMOTE_REFUSED", str(error)),
            RemoteError: lambda error: refused(grpc.StatusCode.UNAVAILABLE, "TIER_FAILED", str(error)),
            UnknownCache: lambda error: unknown("cache_id", error.cache),
            ShuttingDown: lambda error: shutting_down(),
            TicketRefused: lambda error: self._refusal(error.refusal),
        }

    def __call__(self, error: Exception) -> CallRefused:
        if getattr(error, "errno", None) in (errno.EMFILE, errno.ENFILE):  # an OSError or a TierIOError
            return refused(grpc.StatusCode.RESOURCE_EXHAUSTED, "NO_DESCRIPTOR", str(error))
        for kind in type(error).__mro__:
            if translate := self._table.get(kind):
                return translate(error)
        _log.error("a call failed inside the daemon", exc_info=error)
        message = f"a bug of kvtier: {type(error).__name__}: {shown(str(error))}"
        return refused(grpc.StatusCode.INTERNAL, "INTERNAL", message)

    def detail(self, refusal: Refusal) -> common_pb2.ErrorDetail:
        """Detail of a refusal: the tier, the slots wanted and free, the holders."""
        holders = sorted(refusal.holders, key=lambda holder: -holder.slots)[:MAX_HOLDERS]
        return common_pb2.ErrorDetail(
            reason=refusal.reason.name,
            tier=wire.TIER_TO_WIRE[refusal.tier],
            wanted=refusal.wanted,
            free=refusal.free,
            holders=[self._holder(holder) for holder in holders],
        )

    def _refusal(self, refusal: Refusal) -> CallRefused:
        code, says = _REFUSALS[refusal.reason]
        numbers = f"{refusal.wanted} slots of the {refusal.tier} tier wanted, {refusal.free} free"
        return CallRefused(code, f"{says}: {numbers}", self.detail(refusal))

    def _still_held(self, error: ResetRefused) -> CallRefused:
        holders = [self._holder(holder) for holder in error.holders[:MAX_HOLDERS]]
        message = f"{error}; a forced reset drops the rest"
        return refused(grpc.StatusCode.FAILED_PRECONDITION, "STILL_HELD", message, holders=holders)

    def _holder(self, holder: SlotHolder) -> common_pb2.Holder:
        pid, command = self._owner_of(holder.session)
        return common_pb2.Holder(session_id=holder.session, pid=pid, command=shown(command), slots=holder.slots)


_REFUSALS: Final[Mapping[RefusalReason, tuple[grpc.StatusCode, str]]] = {
    RefusalReason.TIER_FULL: (grpc.StatusCode.RESOURCE_EXHAUSTED, "too few slots are free or can be reclaimed"),
    RefusalReason.DEADLINE: (grpc.StatusCode.DEADLINE_EXCEEDED, "no room was made in time"),
    RefusalReason.CANCELLED: (grpc.StatusCode.CANCELLED, "the session was orphaned, or the daemon stops"),
    RefusalReason.TIER_OFFLINE: (grpc.StatusCode.UNAVAILABLE, "the tier is out of service"),
    RefusalReason.TOO_SHORT: (grpc.StatusCode.FAILED_PRECONDITION, "less than min_blocks is stored"),
}


def log_unheard(task: asyncio.Task[Any]) -> None:
    """Logs the error of a task whose caller was cancelled."""
    error = None if task.cancelled() else task.exception()
    if error is not None and not isinstance(error, CallRefused | TierError | MoverError):
        _log.error("a task without a caller failed by a bug: %s", task.get_name(), exc_info=error)
    elif error is not None:
        _log.warning("a task without a caller failed: %s: %s", task.get_name(), error)
