"""The error that the simulation raises when the core breaks a promise."""


class Violation(AssertionError):
    """The core broke a promise that its users could see."""


def require(truth: bool, promise: str) -> None:
    """Raises unless ``truth``. Too slow for checks of every slot after every step, where making the text costs most."""
    if not truth:
        raise Violation(promise)
