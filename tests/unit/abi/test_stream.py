"""Cutting blocks into chunks and putting them together again: every byte once, in order, and nothing else is taken."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.abi.stream import MAX_CHUNK_BYTES, Progress, StreamError

shapes = st.tuples(st.integers(1, 6), st.integers(1, 40))
"""Blocks, and bytes of a block."""


@given(shapes, st.lists(st.integers(1, 100), min_size=1))
def test_what_one_side_cuts_the_other_puts_together(shape, sizes):
    blocks, block_bytes = shape
    sent, received = Progress(blocks, block_bytes), Progress(blocks, block_bytes)
    seen: list[tuple[int, int]] = []
    for size in sizes * (blocks * block_bytes):
        if sent.finished:
            break
        block, offset = sent.block, sent.offset
        spans = sent.take(size)
        nbytes = sum(span.stop - span.start for span in spans)
        assert 1 <= nbytes <= size
        assert received.accept(block, offset, nbytes) == spans
        seen += [(span.block, byte) for span in spans for byte in range(span.start, span.stop)]
    assert sent.finished
    assert received.finished
    received.require_finished()
    assert seen == [(block, byte) for block in range(blocks) for byte in range(block_bytes)]


@given(shapes, st.data())
def test_a_chunk_that_is_not_the_next_one_is_refused_and_changes_nothing(shape, data):
    blocks, block_bytes = shape
    total = blocks * block_bytes
    progress = Progress(blocks, block_bytes)
    progress.take(data.draw(st.integers(0, total)))
    at = progress.block, progress.offset
    chunk = data.draw(st.tuples(st.integers(0, blocks + 1), st.integers(0, block_bytes + 1), st.integers(0, total + 1)))
    block, offset, nbytes = chunk
    left = total - at[0] * block_bytes - at[1]
    if (block, offset) == at and 1 <= nbytes <= left:
        assert sum(span.stop - span.start for span in progress.accept(*chunk)) == nbytes
    else:
        with pytest.raises(StreamError):
            progress.accept(*chunk)
        assert (progress.block, progress.offset) == at


def test_the_refusal_names_field_value_and_limit():
    progress = Progress(2, 10)
    progress.accept(0, 0, 15)
    with pytest.raises(StreamError, match=r"bytes\.block = 0: must be 1, where the last chunk ended"):
        progress.accept(0, 5, 1)
    with pytest.raises(StreamError, match=r"bytes\.offset = 4: must be 5 of block 1"):
        progress.accept(1, 4, 1)
    with pytest.raises(StreamError, match=r"at most the 5 bytes left"):
        progress.accept(1, 5, 6)
    with pytest.raises(StreamError, match=f"1 to {MAX_CHUNK_BYTES} bytes"):
        progress.accept(1, 5, MAX_CHUNK_BYTES + 1)
    with pytest.raises(StreamError, match="ended at byte 5 of block 1"):
        progress.require_finished()
    progress.accept(1, 5, 5)
    with pytest.raises(StreamError, match="all blocks are complete"):
        progress.accept(2, 0, 1)


def test_nothing_is_finished_at_once():
    progress = Progress(0, 10)
    assert progress.finished
    progress.require_finished()
    assert progress.take() == []
