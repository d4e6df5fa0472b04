"""Whether what was copied out of shared memory is what the daemon has there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import xxhash

from kvtier import transfer
from kvtier.abi.keys import KEY_BYTES
from kvtier.abi.stream import CHECKSUM_BYTES
from kvtier.binding import Binder, Binding
from kvtier.buffers import Bytes
from kvtier.errors import DamagedTransfer
from kvtier.session import Deadline
from kvtier.v1 import blocks_pb2

_MOST_KEYS: Final = 16_384
"""In one call."""


async def verified(binder: Binder, group: int, packed: bytes, rows: Sequence[Bytes], deadline: Deadline) -> int:
    """How many of the first rows are what the daemon has of these keys; of the next it cannot tell any more.

    Raises :class:`DamagedTransfer` where a row is something else.
    """
    good = 0
    while good < len(rows):
        end = min(good + _MOST_KEYS, len(rows))
        good = await _verified(binder, group, packed, rows, range(good, end), deadline)
        if good < end:
            break
    return good


async def _verified(
    binder: Binder, group: int, packed: bytes, rows: Sequence[Bytes], some: range, deadline: Deadline
) -> int:
    """The first of ``some`` of which the daemon cannot tell, or their end."""

    def ask(binding: Binding) -> blocks_pb2.ChecksumsRequest:
        keys = packed[some.start * KEY_BYTES : some.stop * KEY_BYTES]
        return blocks_pb2.ChecksumsRequest(cache_id=binding.cache_id, group=group, keys=keys)

    reply = await binder.call(lambda stubs: stubs.blocks.Checksums, ask, deadline)
    ours: list[bytes] = []
    work = lambda: ours.extend(xxhash.xxh3_128_digest(rows[row].data) for row in some)  # noqa: E731
    await transfer.run(work, sum(len(rows[row]) for row in some))
    for place, (row, known, digest) in enumerate(zip(some, reply.known, ours, strict=True)):
        if not known:
            return row
        if reply.checksums[place * CHECKSUM_BYTES : (place + 1) * CHECKSUM_BYTES] != digest:
            message = f"block {row}: what was copied is not what the daemon has in memory"
            raise DamagedTransfer(message, reason="CHECKSUM_MISMATCH")
    return some.stop
