"""The bytes of blocks in a stream: one block after another, cut into chunks at any byte.

The rules are in ``proto/kvtier/v1/transfer.proto``. Sender and receiver use the same :class:`Progress`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from kvtier.abi.spec import InvalidArgument

MAX_CHUNK_BYTES: Final = 1 << 20
"""Bytes in one message: well under gRPC's default limit of 4 MiB, and copied in a fraction of a millisecond."""

CHECKSUM_BYTES: Final = 16
"""xxh3-128, big-endian."""

GO_AHEAD_KEY: Final = "kvtier-go-ahead"
"""Key in the initial metadata of an upload: the slots are reserved, the client may send the bytes."""


class StreamError(InvalidArgument, ValueError):
    """A chunk is not the next part of its blocks."""


class Span(NamedTuple):
    """Bytes [``start``, ``stop``) of a block."""

    block: int
    start: int
    stop: int


class Progress:
    """The position in a transfer of ``blocks`` blocks of ``block_bytes`` bytes."""

    def __init__(self, blocks: int, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._position = 0
        self._total = blocks * block_bytes

    @property
    def finished(self) -> bool:
        return self._position == self._total

    @property
    def block(self) -> int:
        """The block that the next byte belongs to."""
        return self._position // self._block_bytes

    @property
    def offset(self) -> int:
        """The next byte's place in its block."""
        return self._position % self._block_bytes

    def take(self, nbytes: int = MAX_CHUNK_BYTES) -> list[Span]:
        """Advances over the next ``nbytes`` bytes, or all bytes left. Returns them by block."""
        stop = min(self._position + nbytes, self._total)
        spans = list(self._spans(self._position, stop))
        self._position = stop
        return spans

    def accept(self, block: int, offset: int, nbytes: int) -> list[Span]:
        """Advances over a received chunk. Raises :class:`StreamError` if it is not the next part."""
        if not 1 <= nbytes <= MAX_CHUNK_BYTES:
            raise StreamError("bytes.data", f"{nbytes} bytes", f"1 to {MAX_CHUNK_BYTES} bytes")
        if self.finished:
            raise StreamError("bytes.block", block, "no more: all blocks are complete")
        if block != self.block:
            raise StreamError("bytes.block", block, f"{self.block}, where the last chunk ended")
        if offset != self.offset:
            raise StreamError("bytes.offset", offset, f"{self.offset} of block {block}, where the last chunk ended")
        left = self._total - self._position
        if nbytes > left:
            raise StreamError("bytes.data", f"{nbytes} bytes", f"at most the {left} bytes left of the last block")
        return self.take(nbytes)

    def require_finished(self) -> None:
        """Checks the end of the stream. Raises :class:`StreamError` if bytes are missing, and names their block."""
        if not self.finished:
            raise StreamError("bytes", f"ended at byte {self.offset} of block {self.block}", "all bytes of all blocks")

    def _spans(self, start: int, stop: int) -> Iterator[Span]:
        while start < stop:
            block, offset = divmod(start, self._block_bytes)
            end = min(self._block_bytes, offset + stop - start)
            yield Span(block, offset, end)
            start += end - offset
