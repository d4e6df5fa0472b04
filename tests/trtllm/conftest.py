"""Daemons, as the integration tests have them."""

import pytest

from tests.integration.conftest import pool, start_daemon, start_fresh

__all__ = ["pool", "start_daemon", "start_fresh"]


@pytest.fixture
def daemon(start_daemon):
    return start_daemon(host=2048, disk=4096)
