"""What kvtier does, it does on this device: the integration tests that say so, run on it."""

from __future__ import annotations

import os
from typing import Final

import pytest

from tests import devices
from tests.sessions import Sessions

_WAITS_S: Final = 420.0
"""For sessions, of which each ends itself where a test in it hangs."""

pytestmark = [pytest.mark.gpu, pytest.mark.limit(_WAITS_S)]

MODULES: Final = (
    # Those that take longest first.
    "test_events_complete",
    "test_mirror",
    "test_torture",
    "test_crash",
    "test_restart",
    "test_reads_without_calls",
    "test_supervise",
    "test_across_groups",
    "test_policies",
    "test_dead_clients",
    "test_transfer",
    "test_caches",
    "test_verbs",
    "test_edges",
    "test_model_kinds",
    "test_two_clients",
    "test_disk_faults",
    "test_retention_verbs",
    "test_calls",
    "test_refusals",
    "test_consumer",
    "test_sync_client",
    "test_tensors",
)


@pytest.fixture(scope="module")
def sessions():
    jobs = max(1, (os.cpu_count() or 1) * 3 // 4)
    with Sessions(devices.DEVICE, {f"integration/{module}": "" for module in MODULES}, jobs) as sessions:
        yield sessions


@pytest.mark.parametrize("module", MODULES)
def test_it_means_the_same_here(sessions, module, tell):
    outcome = sessions.outcome(f"integration/{module}")
    outcome.assert_passed()
    tell.append(f"{outcome.tests - len(outcome.skipped)} passed, {len(outcome.skipped)} skipped")
    tell.extend(sorted(set(outcome.skipped)))
