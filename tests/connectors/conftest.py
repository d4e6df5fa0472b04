"""Daemons for the tests of connectors: those of the integration tests."""

from tests.integration.conftest import pool, start_daemon, start_fresh

__all__ = ["pool", "start_daemon", "start_fresh"]
