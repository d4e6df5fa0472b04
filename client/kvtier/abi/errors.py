"""The one shape of "this value is not acceptable"."""

from __future__ import annotations


class FieldError(ValueError):
    """A field holds a value outside its limit. All three are in the message and on the error.

    ``value`` may come from a stranger, so the message shows at most 80 characters of it.
    """

    def __init__(self, field: str, value: object, limit: str) -> None:
        shown = repr(value)
        if len(shown) > 80:
            shown = f"{shown[:77]}..."
        super().__init__(f"{field} = {shown}: must be {limit}")
        self.field = field
        self.value = value
        self.limit = limit


class AbiError(FieldError):
    """A control segment that cannot be trusted, or a slot that does not exist: ``field``, ``value``, ``limit``."""


def require_int(field: str, value: object, low: int, high: int, error: type[FieldError]) -> int:
    """``value`` as an ``int`` in [low, high]; raises ``error`` otherwise. A bool is not a number here."""
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise error(field, value, f"an integer from {low} to {high}")
    return value


def require_equal(field: str, value: object, expected: object, error: type[FieldError]) -> None:
    """Raises ``error`` where ``value`` is not ``expected``."""
    if value != expected:
        raise error(field, value, repr(expected))
