"""A chain stored in several window groups as one: in all of them, or in none.

Room is reserved in every group before a byte is copied, and groups that can refuse a block (full-attention ones, whose
blocks need their parents) are asked first. What was stored before a later group failed is dropped again. A chain of
more than half a tier of a group, and one whose bytes go through streams, has its room piece by piece instead.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from kvtier import arrays
from kvtier.arrays import Filled, Piece, Way
from kvtier.errors import DaemonUnavailable, KvtierError, LeaseLost
from kvtier.types import BlockResult, Tier

if TYPE_CHECKING:
    from kvtier.cache import Cache
    from kvtier.session import Session

_REFUSED: Final = frozenset({BlockResult.PARENT_MISSING, BlockResult.PARENT_CONFLICT})

_log = logging.getLogger(__name__)


@dataclass(slots=True, frozen=True)
class Share:
    """What one window group stores of a chain."""

    cache: Cache
    piece: Piece

    @property
    def stands_alone(self) -> bool:
        """Its blocks need no parents: a sliding group."""
        return self.cache.spec.groups[self.cache.group].window_tokens > 0


@dataclass(slots=True)
class JointPut:
    """One call. ``way``: how pieces go where not all goes in one step. ``results`` and ``stored``: by group; the latter
    are the keys that are there because of this call."""

    session: Session
    way: Callable[[Cache], Way]
    shares: Sequence[Share]
    tier: Tier
    timeout: float | None
    results: dict[int, list[BlockResult]] = field(default_factory=dict)
    stored: dict[int, list[bytes]] = field(default_factory=dict)

    async def run(self) -> dict[int, list[BlockResult]]:
        """The results of all groups; where one refused a block, of none is anything stored, and they say so."""
        ordered = sorted(self.shares, key=lambda share: (share.stands_alone, share.cache.group))
        try:
            try:
                await self._put(ordered)
            except LeaseLost:
                # The daemon restarted under us; the caller's arrays are still good.
                await self._put(ordered)
        except BaseException as error:
            if isinstance(error, KvtierError) and not isinstance(error, DaemonUnavailable):
                await self._undo()
            else:
                self.session.spawn(self._undo())
            raise
        if any(_REFUSED.intersection(results) for results in self.results.values()):
            await self._undo()
            self._say_nothing_is_stored()
        return {share.cache.group: self.results[share.cache.group] for share in self.shares}

    async def _put(self, shares: Sequence[Share]) -> None:
        ways = [self.way(share.cache) for share in shares]
        steps = [arrays.pieces(share.cache, self.tier, way) for share, way in zip(shares, ways, strict=True)]
        if all(len(share.piece.chain) <= step for share, step in zip(shares, steps, strict=True)):
            await self._put_at_once(shares)
            return
        # Each piece reserves for itself, so a later one may find no room: what was stored is dropped again then.
        for share, way in zip(shares, ways, strict=True):
            results: list[BlockResult] = []
            try:
                await arrays.put(share.cache, way, self.tier, share.piece, self.timeout, results)
            finally:
                refused = self._note(share, results)
            if refused:
                return

    async def _put_at_once(self, shares: Sequence[Share]) -> None:
        filled: list[Filled] = []
        try:
            for share in shares:  # not in one expression: where one fails, those before it are given up
                filled.append(await self.way(share.cache).fill(self.tier, share.piece, self.timeout))  # noqa: PERF401
            for share in shares:
                if self._note(share, await filled.pop(0).commit()):
                    return
        finally:
            for each in filled:
                await each.give_up()

    def _note(self, share: Share, results: list[BlockResult]) -> bool:
        """Whether the group refused any of its blocks. ``results``: of its first blocks, where the put failed."""
        group = share.cache.group
        self.results[group] = results
        new = [key for key, result in zip(share.piece.chain, results, strict=False) if result is BlockResult.OK]
        # Once each, though stored again after a restart.
        self.stored[group] = list(dict.fromkeys([*self.stored.get(group, ()), *new]))
        return not _REFUSED.isdisjoint(results)

    async def _undo(self) -> None:
        """Drops what this call has stored. What somebody else holds by now is theirs, and stays."""
        for share in self.shares:
            keys = self.stored.pop(share.cache.group, [])
            try:
                for start in range(0, len(keys), arrays.MAX_PIECE):
                    await share.cache.drop(keys[start : start + arrays.MAX_PIECE], timeout=self.timeout)
            except KvtierError as error:
                _log.warning("cache %s: blocks of a put that failed stay stored: %s", share.cache.name, error)

    def _say_nothing_is_stored(self) -> None:
        """A block that was there before is there still; every other one lacks a parent, in its group or another."""
        for share in self.shares:
            group = share.cache.group
            found = self.results.get(group) or [BlockResult.PARENT_MISSING] * len(share.piece.chain)
            self.results[group] = [BlockResult.PARENT_MISSING if one is BlockResult.OK else one for one in found]
