"""kill -9 under mixed load: no byte is wrong, no acknowledged block is lost, no event is missing."""

import pytest

from tests.integration.test_crash import SEED
from tests.integration.trial import kill_under_load
from tests.torture.runs import scaled

MODES = {
    "back": (),
    "checked": ("--debug-checks",),
    "through": ("--write-policy", "through"),
    "selective": ("--write-policy", "selective", "--eviction", "lfuda"),
    "synced": ("--sync", "commit"),
}
KILLS = scaled(200 // len(MODES), 2)

pytestmark = [pytest.mark.long, pytest.mark.limit(1800)]


@pytest.mark.parametrize("mode", MODES)
async def test_kills(start_fresh, found, mode):
    line = await kill_under_load(start_fresh, KILLS, SEED + list(MODES).index(mode), *MODES[mode])
    found(f"{mode}: {line}")
