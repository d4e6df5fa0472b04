"""What can go wrong, by what the caller can do about it.

``RetryableError``: nothing is wrong with the call; the same call can succeed later. ``CallerError``: the call is
wrong and stays wrong. ``DeviceError``: this process's GPU failed it. ``DataLoss``: bytes are gone. ``DaemonError``: a
bug of kvtier, please report it.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvtier.types import Tier


class KvtierError(Exception):
    """Base of everything that kvtier raises on purpose. ``reason`` is stable and machine readable."""

    def __init__(self, message: str, *, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason


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
    """All that nobody holds could not make room: ``wanted`` slots of ``tier``, ``free`` of them to be had."""

    def __init__(
        self, message: str, *, tier: Tier | None, wanted: int, free: int, holders: tuple[Holder, ...], reason: str
    ) -> None:
        super().__init__(message, reason=reason)
        self.tier = tier
        self.wanted = wanted
        self.free = free
        self.holders = holders


class DeadlineExceeded(RetryableError):
    """The call's time ran out. Whatever the daemon granted meanwhile is given back by the client."""


class TierOffline(RetryableError):
    """The tier's device failed; the daemon goes on without it and takes it back when it recovers."""


class DaemonUnavailable(RetryableError):
    """No daemon answers at the address, or it went away during a call that cannot be repeated safely."""


class StaleRead(RetryableError):
    """A slot's generation changed while its bytes were copied: what was copied is not the block."""


class DamagedTransfer(RetryableError):
    """Bytes did not arrive as they were sent. A put stored nothing of them; what a get wrote is not the blocks."""


class CallerError(KvtierError):
    """The call is wrong; repeating it does not help."""


class InvalidArgument(CallerError):
    """A value outside its limit. All three are in the message and on the error."""

    def __init__(self, field: str, value: object, limit: str, *, reason: str = "BAD_ARGUMENT") -> None:
        shown = value if isinstance(value, str) else repr(value)
        if len(shown) > 80:
            shown = f"{shown[:77]}..."
        super().__init__(f"{field} = {shown}: must be {limit}", reason=reason)
        self.field = field
        self.value = shown
        self.limit = limit


def require_within(field: str, value: float, low: float, high: float, limit: str = "") -> None:
    """Raises :class:`InvalidArgument` for a number below ``low``, above ``high`` or not a number at all."""
    if not low <= value <= high:
        raise InvalidArgument(field, value, limit or f"{low} to {high}")


class SpecMismatch(InvalidArgument):
    """The cache is open, or remembered on disk, with another specification."""


class NotFound(CallerError):
    """No such cache, group or session."""


class TooShort(NotFound):
    """Less than ``min_blocks`` of the chain is stored: ``matched`` blocks."""

    def __init__(self, message: str, *, matched: int, reason: str) -> None:
        super().__init__(message, reason=reason)
        self.matched = matched


class StillHeld(CallerError):
    """A reset is refused while anything is leased or pinned. ``holders``: who leases what, most first."""

    def __init__(self, message: str, *, holders: tuple[Holder, ...], reason: str) -> None:
        super().__init__(message, reason=reason)
        self.holders = holders


class LeaseError(CallerError):
    """The lease cannot be used for this."""


class LeaseLost(LeaseError):
    """The lease ended with its session: the daemon restarted, or an operator kicked the session. Its slots belong to
    others now. Acquire again."""


class PermissionDenied(CallerError):
    """This process may not talk to the daemon."""


class CursorCompacted(CallerError):
    """The events after the cursor are no longer held; ``oldest`` is the first id that is."""

    def __init__(self, message: str, *, oldest: int, reason: str) -> None:
        super().__init__(message, reason=reason)
        self.oldest = oldest


class ClientClosed(CallerError):
    """The client, or the lease's cache, is closed."""


class DeviceError(KvtierError):
    """A call of CUDA failed in this process; what was asked of the daemon was not sent, and leases stay held. ``call``
    is the entry point, ``code`` the ``CUresult``. Reason DEVICE_LOST: this process can use its GPU no more and must be
    started anew, after whose end the daemon has its slots back. DEVICE_FAILED: anything else; the message says what."""

    def __init__(self, message: str, *, call: str, code: int, reason: str) -> None:
        super().__init__(message, reason=reason)
        self.call = call
        self.code = code


class DataLoss(KvtierError):
    """Bytes that the daemon had accepted are gone or damaged."""


class DaemonError(KvtierError):
    """A bug of kvtier: the daemon answered what it must never answer, or failed inside."""
