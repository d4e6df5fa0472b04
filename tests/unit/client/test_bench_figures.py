"""How ``kvtier bench`` makes its figures."""

from __future__ import annotations

import pytest

from kvtier.bench.host import Result, interleaved, spec_of


def test_a_rate_is_in_mib_a_second() -> None:
    result = Result.rate("store", {"block_bytes": 4096}, 8 << 20, 4.0, 1.0)
    assert (result.value, result.floor, result.ratio) == (2.0, 8.0, 0.25)


async def test_rounds_rotate_the_order_and_the_first_two_do_not_count() -> None:
    order = ""

    async def work(name: str) -> float:
        nonlocal order
        order += name
        return float(len(order))

    medians = await interleaved(3, lambda: work("o"), lambda: work("f"))
    assert order == "offoof" + "foof"
    assert medians == [8.0, 7.0]


@pytest.mark.parametrize("size", [4096, 64 << 10, 1 << 20])
def test_a_specification_has_blocks_of_the_size_asked_for(size: int) -> None:
    assert spec_of(size).block_bytes(0) == size
