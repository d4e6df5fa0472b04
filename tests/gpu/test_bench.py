"""``kvtier bench gpu``: its figures go into the report of ``make gpu-hour``."""

import json
from dataclasses import asdict

import pytest

from kvtier.bench.gpu import SHAPES, gpu
from tests import devices

pytestmark = pytest.mark.gpu

LONG, BATCH_BYTES, SETTLE_S = (SHAPES[:1], 1 << 20, 0.0) if devices.ON_FAKE else (SHAPES, 256 << 20, 2.0)
SHORT = [shape for shape in LONG if shape in ((1, 64 << 10), (1, 1 << 20))]


@pytest.mark.parametrize(
    ("rounds", "shape"),
    [(5, shape) for shape in SHORT] + [(40, shape) for shape in LONG],
    ids=[f"short-{shape}" for shape in SHORT] + [f"long-{shape}" for shape in LONG],
)
async def test_the_speed_of_moves(rounds, shape, record_property):
    for figure in await gpu(devices.NAME, [shape], BATCH_BYTES, 1 if devices.ON_FAKE else rounds, SETTLE_S):
        assert figure.value > 0
        record_property("figure", json.dumps(asdict(figure) | {"ratio": figure.ratio}))
