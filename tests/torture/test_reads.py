"""Readers and writers in processes of their own on tiny tiers, while the daemon is killed."""

import pytest

from kvtier.abi.layout import INDEXES_HERE
from tests.integration.test_crash import SEED
from tests.integration.test_torture import PARTS, supervised, unsupervised
from tests.torture.runs import scaled

CHECKED = ("--debug-checks",)
"""Flags for the daemon's own checks, which take most of its time, so that fewer blocks are evicted."""

pytestmark = [pytest.mark.long, pytest.mark.skipif(not INDEXES_HERE, reason="no reads without calls on this processor")]


@pytest.mark.parametrize(("variant", "flags"), [(supervised, CHECKED), (unsupervised, ())])
def test_every_byte_is_right_for_a_long_time(short_dir, found, variant, flags):
    """Runs once with the daemon's own checks after each step, and once without them, with many more steps."""
    ends, seconds = scaled(4, 2), scaled(75)
    report = variant(
        short_dir, SEED + 1, parts=PARTS + PARTS, turns=scaled(200, 15), ends=ends, seconds=seconds, flags=flags
    )
    sums = report.sums
    found(
        f"{variant.__name__}, {report.restarts} ends in {report.seconds:.0f} s: {sums['wrong']} wrong of "
        f"{sums['blocks']:,} blocks read, {sums['hits']:,} without a call, {sums['reuses']:,} thrown away in time"
    )
