"""What a benchmark's figures are made of."""

from __future__ import annotations

import json
import random

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.bench.place import spec_of
from kvtier.bench.result import Paired, Result, quantile, spread
from kvtier.bench.rounds import WARM_UP, interleaved
from kvtier.cli.bench import SizeType
from kvtier.errors import InvalidArgument


def test_a_rate_is_the_ratio_of_medians() -> None:
    paired = Paired(ours=[2.0, 9.0, 4.0], floor=[1.0, 2.0, 1.0])
    result = paired.rate("store", {"blocks": 64}, 8 << 20)
    assert (result.value, result.floor, result.ratio) == (2.0, 8.0, 0.25)
    assert result.params["rounds"] == 3


def test_a_time_is_in_microseconds() -> None:
    result = Paired(ours=[3e-3], floor=[1e-3]).time("match", {})
    assert (result.value, result.floor, result.unit) == (3000.0, 1000.0, "us")


def test_the_json_has_exactly_the_documented_fields() -> None:
    told = Result("scale", {"blocks": 10}, 1.23456789, "us").to_json()
    assert told == {
        "name": "scale",
        "params": {"blocks": 10},
        "value": 1.2346,
        "unit": "us",
        "floor": None,
        "ratio": None,
    }
    assert json.loads(json.dumps(told)) == told


def test_the_spread_is_of_the_middle() -> None:
    assert spread([1.0]) == 0.0
    times = [1.0] * 50 + [100.0, 0.01]
    random.Random(1).shuffle(times)
    assert spread(times) == 0.0
    assert spread([1.0, 2.0, 3.0, 4.0, 5.0] * 4) > 0.5


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0, 1))
def test_a_quantile_is_one_of_the_values(times: list[float], q: float) -> None:
    found = quantile(times, q)
    assert found in times
    assert sum(each < found for each in times) <= q * len(times)


async def test_rounds_alternate_who_comes_first_and_warm_up_does_not_count() -> None:
    order = ""

    async def ours() -> float:
        nonlocal order
        order += "o"
        return float(len(order))

    async def floor() -> float:
        nonlocal order
        order += "f"
        return float(len(order))

    paired = await interleaved(ours, floor, 3)
    assert order == "offoof" + "foof"
    assert (len(paired.ours), len(paired.floor)) == (3, 3)
    assert min(paired.ours + paired.floor) > 2 * WARM_UP


@pytest.mark.parametrize("size", [16, 4096, 64 << 10, 1 << 20, 4 << 20])
def test_a_specification_of_any_size_has_blocks_of_that_size(size: int) -> None:
    assert spec_of(size).block_bytes(0) == size


@pytest.mark.parametrize("size", [0, 8, 17])
def test_a_size_that_no_block_can_have_is_refused(size: int) -> None:
    with pytest.raises(InvalidArgument):
        spec_of(size)


@pytest.mark.parametrize(("text", "size"), [("7", 7), ("64KiB", 65536), ("1 MiB", 1 << 20), ("2gib", 2 << 30)])
def test_sizes_on_the_command_line(text: str, size: int) -> None:
    assert SizeType().convert(text, None, None) == size


@pytest.mark.parametrize("text", ["", "KiB", "1.5MiB", "-1", "1TB", "x"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter):
        SizeType().convert(text, None, None)
