"""What the simulation raises when the core broke a promise."""

from __future__ import annotations


class Violation(AssertionError):
    """Something that a user of the core could see is not as promised."""


def require(truth: bool, promise: str) -> None:
    """Not for what is looked at in every slot after every step: there the text alone costs more than the look."""
    if not truth:
        raise Violation(promise)
