"""Fixtures of the torture runs: each run reports its work and its result in a line."""

from collections.abc import Callable

import pytest

from tests.integration.conftest import ending, pool, start_daemon, start_fresh
from tests.integration.test_crash import SEED

__all__ = ["ending", "pool", "start_daemon", "start_fresh"]


@pytest.fixture(autouse=True)
def _say_seed() -> None:
    print(f"KVTIER_SEED={SEED}")


@pytest.fixture
def found(record_property: Callable[[str, object], None]) -> Callable[[str], None]:
    """Gives a function that reports a run's line; ``tests/conftest.py`` shows the line at the end of pytest's
    output."""

    def say(line: str) -> None:
        print(line)
        record_property("torture", line)

    return say
