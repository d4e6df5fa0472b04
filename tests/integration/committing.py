"""Commits by hand, numbered so that they may be repeated."""

from __future__ import annotations

from collections.abc import Sequence

from kvtier import Tier
from kvtier.v1 import blocks_pb2, common_pb2
from tests.integration.blocks import chain, sizes
from tests.integration.raw import RawClient, commit_request

OK = bytes([common_pb2.BLOCK_RESULT_OK])
GARBAGE = b"\xff" * 4096
"""That no message looks like."""


async def reserved(raw: RawClient, cache: int, keys: Sequence[bytes], seq: int) -> blocks_pb2.CommitRequest:
    """A commit of all keys, as a chain, that ends its lease."""
    request = commit_request(cache, await raw.reserve(cache, Tier.HOST, len(keys)), keys)
    request.release, request.seq = True, seq
    return request


async def requests(raw: RawClient, name: str, count: int) -> list[blocks_pb2.CommitRequest]:
    """Of a block each."""
    cache = (await raw.open(name, budgets=sizes(host=64))).cache_id
    return [await reserved(raw, cache, chain(f"{name} {index}", 1), index + 1) for index in range(count)]
