"""Daemons, as the integration tests have them."""

from tests.integration.conftest import pool, start_daemon, start_fresh

__all__ = ["pool", "start_daemon", "start_fresh"]
