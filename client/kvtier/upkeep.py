"""The verbs that move, forget and keep blocks of one window group: a call each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvtier.abi.keys import KEY_BYTES
from kvtier.arena import Binder
from kvtier.lookups import DeadlineOf
from kvtier.retention import each_duration_ms, each_priority
from kvtier.session import Session
from kvtier.types import BlockResult, Tier
from kvtier.v1 import blocks_pb2
from kvtier.wire import DropReport, Keys, ResetReport, packed_keys, tier_to_wire


class Upkeep:
    """See the verbs of :class:`kvtier.Cache`."""

    def __init__(self, session: Session, binder: Binder, group: int, deadline: DeadlineOf) -> None:
        self._session: Final = session
        self._binder: Final = binder
        self._group: Final = group
        self._deadline: Final = deadline

    async def move(self, keys: Keys, to: Tier, dry_run: bool, timeout: float | None) -> list[BlockResult]:
        packed, seq = packed_keys(keys), self._session.next_seq()
        deadline = self._deadline(timeout)
        wait_ns = deadline.wait_ns()
        reply = await self._binder.call(
            lambda stubs: stubs.blocks.Move,
            lambda binding: blocks_pb2.MoveRequest(
                cache_id=binding.cache_id,
                group=self._group,
                to=tier_to_wire(to, "to"),
                keys=packed,
                timeout_ns=wait_ns,
                seq=seq,
                dry_run=dry_run,
            ),
            deadline,
        )
        return [BlockResult(result) for result in reply.results]

    async def drop(self, keys: Keys, dry_run: bool, timeout: float | None) -> DropReport:
        packed, seq = packed_keys(keys), self._session.next_seq()
        reply = await self._binder.call(
            lambda stubs: stubs.blocks.Drop,
            lambda binding: blocks_pb2.DropRequest(
                cache_id=binding.cache_id, group=self._group, keys=packed, seq=seq, dry_run=dry_run
            ),
            self._deadline(timeout),
        )
        return DropReport([BlockResult(result) for result in reply.results], reply.dropped)

    async def set_retention(
        self,
        keys: Keys,
        priorities: int | Sequence[int],
        durations_s: float | Sequence[float | None] | None,
        timeout: float | None,
    ) -> list[BlockResult]:
        packed, seq = packed_keys(keys), self._session.next_seq()
        count = len(packed) // KEY_BYTES
        ranks, durations = each_priority(count, priorities), each_duration_ms(count, durations_s)
        reply = await self._binder.call(
            lambda stubs: stubs.blocks.SetRetention,
            lambda binding: blocks_pb2.SetRetentionRequest(
                cache_id=binding.cache_id,
                group=self._group,
                keys=packed,
                priorities=ranks,
                durations_ms=durations,
                seq=seq,
            ),
            self._deadline(timeout),
        )
        return [BlockResult(result) for result in reply.results]

    async def pin(self, keys: Keys, tier: Tier, unpin: bool, timeout: float | None) -> list[BlockResult]:
        packed, seq = packed_keys(keys), self._session.next_seq()
        reply = await self._binder.call(
            lambda stubs: stubs.blocks.Pin,
            lambda binding: blocks_pb2.PinRequest(
                cache_id=binding.cache_id,
                group=self._group,
                tier=tier_to_wire(tier),
                keys=packed,
                unpin=unpin,
                seq=seq,
            ),
            self._deadline(timeout),
        )
        return [BlockResult(result) for result in reply.results]

    async def reset(self, force: bool, dry_run: bool, timeout: float | None) -> ResetReport:
        seq = self._session.next_seq()
        reply = await self._binder.call(
            lambda stubs: stubs.blocks.Reset,
            lambda binding: blocks_pb2.ResetRequest(cache_id=binding.cache_id, force=force, dry_run=dry_run, seq=seq),
            self._deadline(timeout),
        )
        return ResetReport(reply.dropped, reply.kept)
