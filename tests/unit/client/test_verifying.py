"""What was copied against what the daemon says of it."""

import asyncio
from typing import Any, Final

import numpy as np
import pytest
import xxhash

from kvtier.abi.keys import KEY_BYTES
from kvtier.deadline import Deadline
from kvtier.errors import DamagedTransfer
from kvtier.reading import verified
from kvtier.v1 import blocks_pb2
from kvtierd.service import validation

COUNT: Final = 8
ROWS: Final = list(np.arange(COUNT, dtype="<u4").view(np.uint8).reshape(COUNT, 4))
PACKED: Final = b"".join(number.to_bytes(KEY_BYTES, "little") for number in range(COUNT))


class Told:
    """A daemon that has the rows but for one that is gone and one that is another."""

    def __init__(self, gone: int = -1, other: int = -1) -> None:
        self.gone = gone
        self.other = other

    async def call(self, method: Any, request: blocks_pb2.ChecksumsRequest, deadline: Deadline) -> Any:
        keys = validation.keys("keys", request.keys)
        rows = [int.from_bytes(key, "little") for key in keys]
        sums = [xxhash.xxh3_128_digest(ROWS[row + (row == self.other)].data) for row in rows]
        return blocks_pb2.ChecksumsResponse(checksums=b"".join(sums), known=bytes(row != self.gone for row in rows))


def good(told: Any) -> int:
    async def ask() -> int:
        return await verified(told, 0, PACKED, ROWS, Deadline(60))

    return asyncio.run(ask())


def test_all_that_is_equal_is_good() -> None:
    assert good(Told()) == COUNT


@pytest.mark.parametrize("gone", [0, 5, COUNT - 1])
def test_nothing_is_told_after_what_is_gone(gone: int) -> None:
    assert good(Told(gone=gone)) == gone


@pytest.mark.parametrize("other", [0, 5])
def test_what_is_another_is_named(other: int) -> None:
    with pytest.raises(DamagedTransfer, match=f"block {other}:"):
        good(Told(other=other))
