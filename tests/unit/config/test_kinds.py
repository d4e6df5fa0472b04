from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from kvtierd.config.kinds import Duration, FreeShare, Size, SizeOrShare, show_duration, show_size

DURATION = TypeAdapter[float](Duration)
SIZE = TypeAdapter[int](Size)
SIZE_OR_SHARE = TypeAdapter[object](SizeOrShare)


@pytest.mark.parametrize(
    ("said", "seconds"),
    [
        (30, 30.0),
        (0.25, 0.25),
        ("30", 30.0),
        ("1.5", 1.5),
        ("30s", 30.0),
        ("250ms", 0.25),
        ("5min", 300.0),
        ("1h30min", 5400.0),
        ("1h 30min", 5400.0),
        (" 2 d ", 172800.0),
    ],
)
def test_durations_are_seconds_or_text(said: object, seconds: float) -> None:
    assert DURATION.validate_python(said) == seconds


@pytest.mark.parametrize(
    "said", ["", "s", "5m", "5 parsecs", "1h30", "-5s", True, None, [1], "nan", "inf", float("nan"), float("inf")]
)
def test_what_is_no_duration_is_refused_with_what_would_be(said: object) -> None:
    with pytest.raises(ValidationError, match="must be seconds, 0 or more, or text such as 30s"):
        DURATION.validate_python(said)


@given(st.integers(0, 10**9).map(lambda milliseconds: milliseconds / 1000))
def test_a_duration_is_written_so_that_it_is_read_back(seconds: float) -> None:
    assert DURATION.validate_python(show_duration(seconds)) == pytest.approx(seconds, rel=1e-5)


@pytest.mark.parametrize("said", ["80%", "8GiB, or so", "8GiB 4", "1e9", "0x10", "", True, "-1"])
def test_what_is_no_size_is_refused_with_what_would_be(said: object) -> None:
    with pytest.raises(ValidationError, match="must be bytes, 0 or more, or text such as 8GiB"):
        SIZE.validate_python(said)


@given(st.integers(0, 1 << 50))
def test_a_size_is_written_so_that_it_is_read_back(size: int) -> None:
    assert SIZE.validate_python(show_size(size)) == size


@given(st.integers(1, 10**8).map(lambda millionths: FreeShare(millionths / 10**6)))
def test_a_share_is_written_so_that_it_is_read_back(share: FreeShare) -> None:
    assert SIZE_OR_SHARE.validate_python(str(share)) == share
    assert 0 <= share.of(80 << 30) <= 80 << 30
