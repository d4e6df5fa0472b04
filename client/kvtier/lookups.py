"""The lookups of one window group: in shared memory where that tells, else by asking the daemon."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Final

import numpy as np

from kvtier.arena import Binder, Binding
from kvtier.reading import Reader
from kvtier.session import Deadline, require_timeout
from kvtier.types import ROOT_PARENT
from kvtier.v1 import blocks_pb2
from kvtier.wire import Keys, ListedBlock, Locations, Match, Page, cursor_from_wire, packed_keys, split_keys

DeadlineOf = Callable[[float | None], Deadline]


class Lookups:
    """See the verbs of :class:`kvtier.Cache`."""

    def __init__(self, binder: Binder, reader: Reader, group: int, deadline: DeadlineOf) -> None:
        self._binder: Final = binder
        self._reader: Final = reader
        self._group: Final = group
        self._deadline: Final = deadline

    async def prefix_length(self, keys: Keys, timeout: float | None) -> int:
        packed = await self._in_turn(packed_keys(keys), timeout)
        length = self._reader.prefix_length(packed, self._group)
        return length if length is not None else (await self._match(packed, timeout)).blocks

    async def match(self, keys: Keys, timeout: float | None) -> Match:
        packed = await self._in_turn(packed_keys(keys), timeout)
        found = self._reader.match(packed, self._group)
        if found is not None:
            return found
        reply = await self._match(packed, timeout)
        return Match(reply.blocks, reply.residency, cursor_from_wire(reply.as_of_event))

    async def locate(self, keys: Keys, timeout: float | None) -> Locations:
        packed = await self._in_turn(packed_keys(keys), timeout)
        found = self._reader.locate(packed, self._group)
        if found is not None:
            return found

        def ask(binding: Binding) -> blocks_pb2.LocateRequest:
            return blocks_pb2.LocateRequest(cache_id=binding.cache_id, group=self._group, keys=packed)

        self._reader.count(calls=1)
        reply = await self._binder.call(lambda stubs: stubs.blocks.Locate, ask, self._deadline(timeout))
        return Locations(
            np.frombuffer(reply.residency, dtype=np.uint8),
            np.array(reply.device_slots, dtype=np.uint32),
            np.array(reply.device_generations, dtype=np.uint64),
            np.array(reply.host_slots, dtype=np.uint32),
            np.array(reply.host_generations, dtype=np.uint64),
        )

    async def pages(self, page_blocks: int, timeout: float | None) -> AsyncGenerator[Page, None]:
        page = 0
        while True:

            def ask(binding: Binding, page: int = page) -> blocks_pb2.ListBlocksRequest:
                return blocks_pb2.ListBlocksRequest(
                    cache_id=binding.cache_id, group=self._group, page=page, limit=page_blocks
                )

            reply = await self._binder.call(lambda stubs: stubs.blocks.List, ask, self._deadline(timeout))
            rows = zip(
                split_keys(reply.keys),
                split_keys(reply.parents),
                reply.residency,
                reply.priorities,
                reply.pinned or bytes(len(reply.residency)),
                strict=True,
            )
            yield Page(
                tuple(
                    ListedBlock(key, None if up == ROOT_PARENT else up, where, rank, pinned)
                    for key, up, where, rank, pinned in rows
                ),
                cursor_from_wire(reply.as_of_event),
            )
            page = reply.next_page
            if not page:
                return

    async def _match(self, packed: bytes, timeout: float | None) -> blocks_pb2.MatchResponse:
        def ask(binding: Binding) -> blocks_pb2.MatchRequest:
            return blocks_pb2.MatchRequest(cache_id=binding.cache_id, group=self._group, keys=packed)

        self._reader.count(calls=1)
        return await self._binder.call(lambda stubs: stubs.blocks.Match, ask, self._deadline(timeout))

    async def _in_turn(self, packed: bytes, timeout: float | None) -> bytes:
        if timeout is not None:
            require_timeout(timeout)
        await asyncio.sleep(0)  # who asks again and again lets others have their turn
        return packed
