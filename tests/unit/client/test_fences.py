"""Points in the work of several streams."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from kvtier.errors import DeviceError
from kvtier.gpu import PASSED, Fence, Unknown, all_of


@dataclass
class Point(Fence):
    reached: bool = False

    def passed(self) -> bool:
        return self.reached


def test_several_have_passed_when_the_last_of_them_has() -> None:
    points = [Point(), Point(), Point()]
    together = all_of([points[0], PASSED, *points[1:]])
    for point in points:
        assert not together.passed()
        point.reached = True
    assert together.passed()


def test_of_one_or_none_nothing_is_made() -> None:
    point = Point()
    assert all_of([PASSED, point]) is point
    assert all_of([PASSED, PASSED]) is PASSED
    assert all_of([]) is PASSED


def test_a_point_that_nobody_knows_is_never_passed_over() -> None:
    error = DeviceError("it cannot be told", call="cuEventQuery", code=999, reason="DEVICE_FAILED")
    with pytest.raises(DeviceError) as raised:
        all_of([Point(reached=True), Unknown(error)]).passed()
    assert raised.value is error
