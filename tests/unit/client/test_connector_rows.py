"""Every memory order of an engine's KV tensors: the rows of a page hold its bytes, each of them once."""

from itertools import permutations

import pytest
import torch

from kvtier.connectors.rows import joined, page_rows

LAYERS, BLOCKS, HEADS, TOKENS, WIDTH = 2, 5, 3, 4, 6


def kv(order: tuple[int, ...], padding: int = 0) -> torch.Tensor:
    """[layers, blocks, heads, tokens, width], whose axes lie in memory in that order; every value is another."""
    shape = (LAYERS, BLOCKS, HEADS, TOKENS, WIDTH + padding)
    memory = torch.arange(torch.Size(shape).numel(), dtype=torch.int16).reshape([shape[axis] for axis in order])
    return memory.permute([order.index(axis) for axis in range(5)])[..., :WIDTH]


@pytest.mark.parametrize("order", list(permutations(range(5))))
@pytest.mark.parametrize("padding", [0, 2])
def test_rows_are_the_bytes_of_their_page(order, padding):
    tensor = kv(order, padding)
    rows = page_rows({f"layer{number}": tensor[number] for number in range(LAYERS)})
    for block in range(BLOCKS):
        held = torch.cat([row[block] for row in rows.values()]).view(torch.int16)
        assert sorted(held.tolist()) == sorted(tensor[:, block].flatten().tolist())
    for row in rows.values():  # they are memory of the engine, not copies
        row.zero_()
    assert not tensor.any()


def test_a_page_is_one_run_where_the_block_is_outermost():
    for order, runs in (((1, 0, 2, 3, 4), 1), ((1, 2, 0, 3, 4), 1), ((0, 1, 2, 3, 4), 2), ((0, 2, 1, 3, 4), 2 * HEADS)):
        tensor = kv(order)
        rows = page_rows({f"layer{number}": tensor[number] for number in range(LAYERS)})
        one = joined(list(rows.values()))
        assert (one is not None) == (runs == 1), order
        if one is not None:
            assert one.shape == (BLOCKS, tensor[:, 0].numel() * 2)
            assert sorted(one[3].view(torch.int16).tolist()) == sorted(tensor[:, 3].flatten().tolist())
        else:
            assert len(rows) == runs
