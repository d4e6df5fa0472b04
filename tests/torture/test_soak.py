"""The soak driver, for a minute or two: nothing grows from one round to the next."""

import pytest

from tests.integration.test_crash import SEED
from tests.torture.runs import scaled
from tests.torture.soak import complaint, soak

pytestmark = pytest.mark.long


async def test_rounds_are_flat(short_dir, found):
    samples = await soak(short_dir, scaled(3, 2), SEED, load_s=15.0)
    found(f"soaked: {samples[1].row()} -> {samples[-1].row()}")
    assert not complaint(samples)
