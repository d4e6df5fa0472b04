"""Each run says what it did and what it found."""

from __future__ import annotations

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
    """Says a run's one line; ``tests/conftest.py`` shows it at the end of pytest's output, whatever ran it."""

    def say(line: str) -> None:
        print(line)
        record_property("torture", line)

    return say
