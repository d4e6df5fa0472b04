"""Why the mover did not do what was asked."""

from __future__ import annotations

from kvtierd.core.ids import CacheId
from kvtierd.core.outcome import Refusal


class MoverError(Exception):
    """Everything the mover raises on its own account; the core's errors pass through it."""


class Refused(MoverError):
    """The core's answer to a ticket was no."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(f"{refusal.tier}: {refusal.reason.value} ({refusal.wanted} wanted, {refusal.free} free)")
        self.refusal = refusal


class UnknownCache(MoverError):
    """No such cache is open, or it is being closed."""

    def __init__(self, cache: CacheId) -> None:
        super().__init__(f"cache {cache} is not open")
        self.cache = cache


class ShuttingDown(MoverError):
    """The daemon takes no new requests."""
