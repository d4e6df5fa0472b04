"""Whether what was copied out of shared memory is what the daemon has there."""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

from kvtier import transfer
from kvtier.abi.keys import KEY_BYTES
from kvtier.abi.stream import CHECKSUM_BYTES
from kvtier.arena import Bytes
from kvtier.binding import Binder, Binding
from kvtier.errors import DamagedTransfer
from kvtier.session import Deadline
from kvtier.v1 import blocks_pb2


async def verified(binder: Binder, group: int, packed: bytes, rows: Sequence[Bytes], deadline: Deadline) -> int:
    """How many of the first rows are what the daemon has of these keys; of the next it cannot tell any more.

    Raises :class:`DamagedTransfer` where a row is something else.
    """

    def ask(binding: Binding) -> blocks_pb2.ChecksumsRequest:
        keys = packed[: len(rows) * KEY_BYTES]
        return blocks_pb2.ChecksumsRequest(cache_id=binding.cache_id, group=group, keys=keys)

    reply = await binder.call(lambda stubs: stubs.blocks.Checksums, ask, deadline)
    ours: list[bytes] = []
    work = lambda: ours.extend(xxhash.xxh3_128_digest(row.data) for row in rows)  # noqa: E731
    await transfer.run(work, sum(len(row) for row in rows))
    for index, (known, digest) in enumerate(zip(reply.known, ours, strict=True)):
        if not known:
            return index
        if reply.checksums[index * CHECKSUM_BYTES : (index + 1) * CHECKSUM_BYTES] != digest:
            message = f"block {index}: what was copied is not what the daemon has in memory"
            raise DamagedTransfer(message, reason="CHECKSUM_MISMATCH")
    return len(rows)
