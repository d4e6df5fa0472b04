"""Tests of the device tier, run again on the fake of NVIDIA's driver."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

import pytest

from tests import devices
from tests.sessions import Sessions

SELECTIONS: Final[Mapping[str, str]] = {
    "integration/test_torture": "every_byte_is_right and supervised",
    "integration/test_across_groups": "acquired_is_held or behind_its_window or (oracle and 0)",
    "integration/test_edges": "",
    "integration/test_verbs": "acquire or reserve or commit or move or held or drop or locate or pieces or reader",
    "integration/test_two_clients": "not who_asks_first",
    "integration/test_model_kinds": "every_tier and (mla or vswa) or views and vgqa",
    "integration/test_transfer": "without_a_mapping or same_blocks or evicted",
    "integration/test_dead_clients": "killed or orphans_slots",
    "integration/test_restart": "leases_die or generations",
    "integration/test_supervise": "all_window_groups",
    "integration/test_policies": "through or threshold_keeps or (blocks_go_down and device)",
}
"""The longest first."""
_JOBS: Final = 2

pytestmark = [pytest.mark.long, pytest.mark.limit(600)]  # each test is a whole session


@pytest.fixture(scope="module")
def sessions() -> Iterator[Sessions]:
    with Sessions(devices.FAKE, SELECTIONS, _JOBS) as sessions:
        yield sessions


@pytest.mark.parametrize("module", SELECTIONS)
def test_it_means_the_same_on_cuda(sessions: Sessions, module: str) -> None:
    sessions.outcome(module).assert_passed()
