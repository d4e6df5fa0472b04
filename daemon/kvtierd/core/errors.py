"""Errors of the core: the caller's, and bugs of the core.

A :class:`RequestError` is raised before anything has changed. After an :class:`InvariantViolation` the state can no
longer be trusted, and the caller must stop.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvtierd.core.ids import GroupId, LeaseId, Tier

if TYPE_CHECKING:
    from kvtierd.core.outcome import SlotHolder


class CoreError(Exception):
    """Base class of the core's errors."""


class RequestError(CoreError):
    """The call cannot be carried out as asked; it changed nothing."""


class BadArgument(RequestError):
    """An argument is outside its limit."""

    def __init__(self, field: str, value: object, limit: str) -> None:
        super().__init__(f"{field} = {value}: {limit}")
        self.field = field
        self.value = value
        self.limit = limit


class UnknownGroup(RequestError):
    def __init__(self, group: GroupId) -> None:
        super().__init__(f"group = {group}: the cache has no such window group")
        self.group = group


class UnknownLease(RequestError):
    """The lease never existed, was released, or ended with its session."""

    def __init__(self, lease: LeaseId) -> None:
        super().__init__(f"lease {lease} does not exist (any more)")


class ForeignLease(RequestError):
    def __init__(self, lease: LeaseId) -> None:
        super().__init__(f"lease {lease} belongs to another session")


class TierOutOfService(RequestError):
    def __init__(self, tier: Tier) -> None:
        super().__init__(f"the {tier} tier is out of service")


class ResetRefused(RequestError):
    """A reset is refused while anything is leased or pinned. ``holders``: sessions and their slots, most slots
    first."""

    def __init__(self, holders: Sequence[SlotHolder], pinned: int) -> None:
        super().__init__(f"{sum(holder.slots for holder in holders)} slots are leased, {pinned} pinned")
        self.holders = tuple(holders)
        self.pinned = pinned


class InvariantViolation(CoreError, AssertionError):
    """A bug of the core."""
