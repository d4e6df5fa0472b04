"""Token ranges to blocks, against the definition: the range of a block's first token has all of it."""

from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import given

from kvtier.errors import InvalidArgument
from kvtier.retention import UNCHANGED, Retention, TokenRange, block_retention, chain_message


def test_what_is_found_outside_all_ranges_stays_as_it_is() -> None:
    message = chain_message(bytes(96), 1, Retention((TokenRange(32, 48, 80),)), 16)
    assert list(message.priorities) == [UNCHANGED, UNCHANGED, 80]
    assert list(message.durations_ms) == [0, 0, 0]


@pytest.mark.parametrize(
    ("ranges", "field"),
    [
        ((TokenRange(5, 5, 50),), "ranges[0].end"),
        ((TokenRange(-1, 4, 50),), "ranges[0].start"),
        ((TokenRange(0, 10, 50), TokenRange(9, 20, 50)), "ranges[1].start"),
        ((TokenRange(10, 20, 50), TokenRange(0, 5, 50)), "ranges[1].start"),
        ((TokenRange(0, None, 50), TokenRange(9, 20, 50)), "ranges[0].end"),
        ((TokenRange(0, 10, 101),), "ranges[0].priority"),
        ((TokenRange(0, 10, 50, 0),), "ranges[0].duration_s"),
        ((TokenRange(0, 10, 50, 1e10),), "ranges[0].duration_s"),
    ],
)
def test_bad_ranges_are_refused_by_name(ranges: tuple[TokenRange, ...], field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        Retention(ranges)
    assert caught.value.field == field


def test_priorities_and_a_retention_exclude_each_other() -> None:
    with pytest.raises(InvalidArgument):
        block_retention(1, 16, 50, Retention())


durations = st.none() | st.integers(1, 1000).map(lambda n: n / 8)


@st.composite
def retentions(draw: st.DrawFn) -> Retention:
    cuts = sorted(draw(st.sets(st.integers(0, 200), min_size=2, max_size=8)))
    pairs = list(zip(cuts[::2], cuts[1::2], strict=False))
    ranges = [TokenRange(start, end, draw(st.integers(0, 100)), draw(durations)) for start, end in pairs]
    if draw(st.booleans()):
        ranges[-1] = TokenRange(ranges[-1].start, None, ranges[-1].priority, ranges[-1].duration_s)
    prompt = draw(st.none() | st.integers(0, 200))
    return Retention(tuple(ranges), draw(st.integers(0, 100)), draw(durations), prompt, draw(st.integers(0, 50)))


@given(retentions(), st.integers(0, 12), st.sampled_from([1, 4, 16, 32]))
def test_each_block_has_the_range_of_its_first_token(retention: Retention, blocks: int, per_block: int) -> None:
    kept = retention.of_blocks(blocks, per_block)
    for block in range(blocks):
        token = retention.first_token + block * per_block
        if retention.prompt_tokens is not None and token >= retention.prompt_tokens:
            expected = (retention.decode_priority, int((retention.decode_duration_s or 0) * 1000))
        else:
            inside = [r for r in retention.ranges if token in range(r.start, 10**6 if r.end is None else r.end)]
            expected = (inside[0].priority, int((inside[0].duration_s or 0) * 1000)) if inside else (35, 0)
        assert (kept.priorities[block], kept.durations_ms[block]) == expected


@given(retentions(), st.integers(1, 12), st.integers(1, 12))
def test_a_chain_in_pieces_is_the_chain(retention: Retention, first: int, second: int) -> None:
    whole = retention.of_blocks(first + second, 16)
    assert whole.only(range(first)) == retention.of_blocks(first, 16)
    later = replace(retention, first_token=retention.first_token + 16 * first)
    assert whole.only(range(first, first + second)) == later.of_blocks(second, 16)
