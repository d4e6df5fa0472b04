"""Daemons, as the integration tests have them."""

from tests.integration.conftest import pool, start_daemon

__all__ = ["pool", "start_daemon"]
