"""kill -9 and upgrades under ``kvtierd --supervise``: the next daemon adopts the memory, and no byte is wrong."""

import pytest

from tests.integration.test_crash import SEED, end_again_and_again
from tests.torture.runs import scaled

pytestmark = [pytest.mark.long, pytest.mark.limit(1800)]


@pytest.mark.parametrize("number", range(1, 1 + scaled(6)))
async def test_ends_under_load(short_dir, found, number):
    """A run has few ends, since the supervisor pauses twice as long after each kill."""
    found(await end_again_and_again(short_dir, 7, SEED + number))
