"""Keys of some blocks of a chain, a run of them or with gaps."""

import pytest

from kvtier.engine import KeyChain
from tests.integration.blocks import chain

KEYS = chain("picked", 6)


@pytest.mark.parametrize("blocks", [[], [3], [0, 1, 2, 3, 4, 5], [2, 3, 4], [0, 1, 4, 5], [1, 3]], ids=str)
def test_pick(blocks):
    of_engine = KeyChain()
    of_engine.extend(KEYS)
    assert of_engine.pick(blocks) == b"".join(KEYS[block] for block in blocks)
    assert [of_engine.parent(block) for block in blocks] == [
        KEYS[block - 1] if block else bytes(32) for block in blocks
    ]
