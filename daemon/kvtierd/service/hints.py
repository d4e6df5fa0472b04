"""Carries out hints, the facts that clients know about the future of blocks, as far as their bounds allow.

Every hint gets an outcome. A rejected hint changes nothing.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeAlias
from weakref import WeakKeyDictionary

from kvtier.v1 import blocks_pb2
from kvtierd.core.conversations import Kept, expected
from kvtierd.core.errors import TierOutOfService
from kvtierd.core.events import Cause
from kvtierd.core.ids import BITS, CacheId, GroupId, Key, Tier
from kvtierd.core.manager import BlockManager
from kvtierd.core.policy import DEFAULT_PRIORITY, MAX_PRIORITY
from kvtierd.core.transfers import BlockResult
from kvtierd.mover.engine import Engine
from kvtierd.mover.executor import TicketRefused, UnknownCache
from kvtierd.service import validation, wire
from kvtierd.service.cache import ServedCache
from kvtierd.service.errors import CallRefused, bad_argument, log_unheard
from kvtierd.service.sessions import ClientSession

LONGEST_MS: Final = 3_600_000
"""Longest time that a hint may ask for."""
HINTS_A_SECOND: Final = 1_000
SHARE: Final = 128
"""A client's hints keep at most one in this many blocks of the lowest tier at a time, or 8 blocks of a small one. A
client beside it loses at most a hundredth of its hits."""
SHARE_ALONE: Final = 8
"""Like ``SHARE``, for a client that alone has the cache open."""

Mover: TypeAlias = Callable[[ClientSession, blocks_pb2.MoveRequest], Awaitable[object]]


class HintAccount:
    """A session's use of hints. Seconds of a clock that does not go back."""

    def __init__(self) -> None:
        self._second = 0
        self._taken = 0
        self.kept: dict[tuple[CacheId, bytes], tuple[float, int]] = {}
        """The end of the time, and the number of blocks, of each target."""

    def require_rate(self, now: float) -> None:
        """Counts a hint. Raises INVALID_ARGUMENT beyond the rate."""
        if int(now) != self._second:
            self._second, self._taken = int(now), 0
        self._taken += 1
        validation.count("hints in a second", self._taken, 0, HINTS_A_SECOND)

    def room(self, order: _Order, now: float, *, alone: bool) -> int:
        """Number of blocks that the session may still keep in the cache, without the target's. ``alone``: no other
        session has the cache open."""
        self.kept = {target: kept for target, kept in self.kept.items() if kept[0] > now}
        others = (n for (cache, of), (_, n) in self.kept.items() if cache == order.cache.id and of != order.target)
        slots = min(order.cache.slots[max(order.cache.slots)])
        share = slots // SHARE_ALONE
        return max(1, share if alone else max(slots // SHARE, min(8, share))) - sum(others)


@dataclass(slots=True, frozen=True)
class _Order:
    """A valid hint. ``tag``: of its conversation; empty = none. ``keys``: its stored blocks, parents first. ``whole``:
    they end with the conversation's last block. ``clips``: the reasons why less is done than was asked for."""

    session: ClientSession
    cache: ServedCache
    manager: BlockManager
    hint: blocks_pb2.Hint
    tag: bytes
    move: Mover
    keys: Sequence[Key]
    whole: bool
    for_ms: int
    clips: list[str]

    @property
    def target(self) -> bytes:
        return self.tag or self.keys[-1]

    def result(self, blocks: int) -> blocks_pb2.HintResult:
        outcome = blocks_pb2.HINT_OUTCOME_CLIPPED if self.clips else blocks_pb2.HINT_OUTCOME_ACCEPTED
        return blocks_pb2.HintResult(outcome=outcome, reason="; ".join(self.clips), blocks=blocks)


class Hints:
    """Carries hints out."""

    def __init__(self, engine: Engine, sessions: Iterable[ClientSession], counts: Counter[tuple[str, str]]) -> None:
        """``sessions``: all live sessions. ``counts``: of hints by action and outcome."""
        self._engine: Final = engine
        self._sessions: Final = sessions
        self._counts: Final = counts
        self._accounts: Final[WeakKeyDictionary[ClientSession, HintAccount]] = WeakKeyDictionary()
        self._moving: Final[set[asyncio.Task[None]]] = set()

    async def take(
        self, session: ClientSession, cache: ServedCache, hint: blocks_pb2.Hint, move: Mover
    ) -> blocks_pb2.HintResult:
        """Carries a hint out, and counts it. ``move``: :meth:`BlocksService.move`."""
        result = await self._taken(session, cache, hint, move)
        outcome = blocks_pb2.HintOutcome.Name(result.outcome).removeprefix("HINT_OUTCOME_").lower()
        self._counts[hint.action if hint.action in _ACTIONS else "unknown", outcome] += 1
        return result

    async def _taken(
        self, session: ClientSession, cache: ServedCache, hint: blocks_pb2.Hint, move: Mover
    ) -> blocks_pb2.HintResult:
        try:
            self._accounts.setdefault(session, HintAccount()).require_rate(time.monotonic())
            carry_out = _ACTIONS.get(hint.action)
            if carry_out is None:
                raise bad_argument("action", hint.action, f"one of {', '.join(_ACTIONS)}")
            validation.count("version", hint.version, 0, 1)
            order = self._order(session, cache, hint, move)
            if not order.keys:
                outcome = blocks_pb2.HINT_OUTCOME_MISSING
                return blocks_pb2.HintResult(outcome=outcome, reason="no block of the target is stored")
            return await carry_out(self, order)
        except (CallRefused, TierOutOfService) as error:
            return blocks_pb2.HintResult(outcome=blocks_pb2.HINT_OUTCOME_REJECTED, reason=str(error))

    def _order(self, session: ClientSession, cache: ServedCache, hint: blocks_pb2.Hint, move: Mover) -> _Order:
        """Raises INVALID_ARGUMENT."""
        manager, step = self._engine.manager(cache.id), cache.spec.tokens_per_block
        tag = validation.conversation("conversation", hint.conversation)
        keys = validation.keys("keys", hint.keys, least=not tag)
        if not tag and (hint.first_token or hint.end_token):
            raise bad_argument("end_token", hint.end_token, "0 without a conversation, and first_token too")
        if hint.end_token and hint.end_token <= hint.first_token:
            raise bad_argument("end_token", hint.end_token, f"more than first_token, {hint.first_token}, or 0")
        validation.count("priority", hint.priority, 0, MAX_PRIORITY)
        if tag and keys and (stored := manager.match([manager.leading], keys).blocks):
            manager.conversations.reach(session.id, tag, keys[stored - 1], time.time_ns())
        if tag:
            end = hint.end_token // step or None
            keys = manager.conversations.chain(tag, math.ceil(hint.first_token / step), end)
        keys = [key for key, place in zip(keys, manager.locate(manager.leading, keys), strict=True) if place.residency]
        tip = manager.conversations.tip(tag) if tag else None
        clips = [f"for_ms = {hint.for_ms}: at most {LONGEST_MS}"] * (hint.for_ms > LONGEST_MS)
        for_ms = min(hint.for_ms or LONGEST_MS, LONGEST_MS)
        whole = tip is not None and keys[-1:] == [tip.key]
        return _Order(session, cache, manager, hint, tag, move, keys, whole, for_ms, clips)

    def _affordable(self, order: _Order, for_ms: int) -> Sequence[Key]:
        """The first blocks of the target, as many as the client may still keep, which count for this time."""
        account, now = self._accounts[order.session], time.monotonic()
        alone = sum(order.cache.id in session.caches for session in self._sessions) == 1
        room = account.room(order, now, alone=alone)
        if room <= 0:
            raise bad_argument("keys", f"{len(order.keys)} blocks", "none: the client's hints keep as many as they may")
        if room < len(order.keys):
            order.clips.append(f"keys = {len(order.keys)} blocks: the client's hints may keep {room} more")
        account.kept[order.cache.id, order.target] = now + for_ms / 1000, min(room, len(order.keys))
        return order.keys[:room]

    async def _reached(self, order: _Order) -> blocks_pb2.HintResult:
        return order.result(len(order.keys))

    async def _retain(self, order: _Order) -> blocks_pb2.HintResult:
        return await self._keep(order, order.hint.priority, order.for_ms, lasting=True)

    async def _return(self, order: _Order) -> blocks_pb2.HintResult:
        return await self._keep(order, *expected(order.for_ms), lasting=False)

    async def _keep(self, order: _Order, priority: int, for_ms: int, *, lasting: bool) -> blocks_pb2.HintResult:
        """Retains the target. ``lasting``: of a conversation, its later blocks instead, once there are any."""
        cache, keys = order.cache, self._affordable(order, for_ms) if priority > DEFAULT_PRIORITY else order.keys
        for group in order.manager.windows:
            if group == order.manager.leading and order.whole and len(keys) == len(order.keys):
                until_ns = time.time_ns() + for_ms * 10**6
                self._engine.keep(cache.id, order.tag, Kept(priority, until_ns, lasting))
            else:
                needed = cache.spec.attention(group).needs(len(keys)).pick(keys)
                few = bytes([priority]) * len(needed), [for_ms] * len(needed)
                await self._engine.set_retention(cache.id, group, needed, *few, Cause.HINT)
        return order.result(len(keys))

    async def _pin(self, order: _Order) -> blocks_pb2.HintResult:
        cache, tier = order.cache, validation.tier("tier", order.hint.tier, order.cache.slots)
        keys, pinned = self._affordable(order, order.for_ms), 0
        for group in order.manager.windows:
            results = self._engine.pin(cache.id, group, tier, keys, unpin=False)
            done = [key for key, result in zip(keys, results, strict=True) if result is BlockResult.OK]
            asyncio.get_running_loop().call_later(order.for_ms / 1000, self._unpin, cache.id, group, tier, done)
            if group == order.manager.leading:
                pinned = len(done)
        if pinned < len(keys):
            order.clips.append(f"tier = {tier}: {pinned} of {len(keys)} blocks are ready there and may be pinned")
        return order.result(pinned)

    def _unpin(self, cache: CacheId, group: GroupId, tier: Tier, keys: Sequence[Key]) -> None:
        with suppress(UnknownCache):
            self._engine.pin(cache, group, tier, keys, unpin=True)

    async def _move(self, order: _Order) -> blocks_pb2.HintResult:
        """Begins to move blocks: up to a tier if no copy is there or above, or down, if a copy is above."""
        tier = validation.tier("tier", order.hint.tier, order.cache.slots)
        up, above = order.hint.action == "prefetch", BITS[tier] - 1

        def moves(residency: int) -> bool:
            return residency > 2 * above + 1 and not residency & (2 * above + 1) if up else bool(residency & above)

        wanted = {}
        for group in order.manager.windows:
            places = zip(order.keys, order.manager.locate(group, order.keys), strict=True)
            wanted[group] = b"".join(key for key, place in places if moves(place.residency))
        if not any(wanted.values()):
            return order.result(len(order.keys))
        task = asyncio.create_task(self._carry(order, tier, wanted), name="hint")
        self._moving.add(task)
        task.add_done_callback(self._moving.discard)
        task.add_done_callback(log_unheard)
        reason = "; ".join([*order.clips, "blocks are on the way"])
        outcome = blocks_pb2.HINT_OUTCOME_DEFERRED
        return blocks_pb2.HintResult(outcome=outcome, reason=reason, blocks=len(order.keys))

    async def _carry(self, order: _Order, tier: Tier, wanted: Mapping[GroupId, bytes]) -> None:
        request = partial(blocks_pb2.MoveRequest, cache_id=order.cache.id, to=wire.TIER_TO_WIRE[tier])
        with suppress(TicketRefused, UnknownCache, CallRefused):  # no room in time, or the client or the cache is gone
            for group, keys in wanted.items():
                if keys:
                    await order.move(order.session, request(group=group, keys=keys, timeout_ns=order.for_ms * 10**6))

    async def _end(self, order: _Order) -> blocks_pb2.HintResult:
        if order.whole:
            order.manager.conversations.shorten(order.tag, order.keys[0])
        ended = await self._engine.end(order.cache.id, order.keys[::-1])
        if ended < len(order.keys):
            order.clips.append(f"{ended} of {len(order.keys)} blocks: later blocks or other conversations need others")
        return order.result(ended)


_ACTIONS: Final[Mapping[str, Callable[[Hints, _Order], Awaitable[blocks_pb2.HintResult]]]] = {
    "reached": Hints._reached,
    "retain": Hints._retain,
    "pin": Hints._pin,
    "prefetch": Hints._move,
    "demote": Hints._move,
    "end": Hints._end,
    "return": Hints._return,
}
