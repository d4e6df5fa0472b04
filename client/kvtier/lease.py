"""Leases: a client's hold on slots, and the views of their bytes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Generic, Self, TypeVar

import numpy as np

from kvtier import buffers
from kvtier.arena import Arena
from kvtier.binding import Binding
from kvtier.errors import KvtierError, LeaseError, LeaseLost, require_within
from kvtier.fences import Stream
from kvtier.memory import Memory, View
from kvtier.prompt import Prompt
from kvtier.retention import BlockRetention, Retention
from kvtier.types import BlockResult, Tier
from kvtier.wire import Keys

if TYPE_CHECKING:
    import torch

    from kvtier.cache import Cache
    from kvtier.holdings import Holdings

T = TypeVar("T")

_STAYS_BLANK: Final = frozenset({BlockResult.PARENT_MISSING, BlockResult.PARENT_CONFLICT})


class Lease:
    """Slots of one tier, held until :meth:`release` or the end of the ``async with`` block.

    A lease lives as long as its session: over a broken connection, not over a restart of the daemon.
    """

    def __init__(
        self, cache: Cache, holdings: Holdings, binding: Binding, tier: Tier, lease_id: int, slots: Sequence[int]
    ) -> None:
        self.cache = cache
        self.tier = tier
        self.id = lease_id
        self.slots = tuple(slots)
        self.binding = binding
        self.released = lease_id == 0
        self._holdings = holdings

    def __len__(self) -> int:
        return len(self.slots)

    @property
    def arena(self) -> Arena:
        return self.binding.arena

    @property
    def memory(self) -> Memory | None:
        """What its slots are mapped to; None where they are not mapped."""
        mapped = self.binding.mapped
        return mapped.memory(self.tier) if mapped is not None and self.tier in mapped.tiers else None

    def view(self, index: int) -> list[View]:
        """The bytes of a slot in place, one a pool, read-only unless the slot is blank: 1-D uint8 arrays, or, where
        the tier is memory of a GPU, a :class:`kvtier.abi.cuda.views.DeviceView` each, which torch, CuPy and others
        take by its ``__cuda_array_interface__``.

        Do not use a view after the release: the slot is somebody else's then. Raises :class:`LeaseError` for a
        released lease and for a slot that a commit gave back, :class:`LeaseLost` for one that died with its daemon,
        :class:`kvtier.errors.CallerError` (CANNOT_MAP) where the tier is not mapped in this process.
        """
        self.require_live()
        self._require_index("index", index)
        return self.arena.view(self.tier, self.cache.group, self.slots[index], write=self._is_blank(index))

    def _require_index(self, field: str, index: int) -> None:
        require_within(field, index, 0, len(self.slots) - 1)

    def tensors(self, index: int) -> list[torch.Tensor]:
        """As :meth:`view`, as torch tensors of the cache's dtype, 1-D, not copied: on the GPU where the tier is its
        memory. Imports torch.

        torch has no read-only tensors. Do not write to one whose slot is not blank: that spoils the block for
        everybody, or, in a cache opened with ``write`` False, ends the process (SIGSEGV).
        """
        return [buffers.over(part, self.cache.spec.dtype) for part in self.view(index)]

    def require_live(self) -> None:
        """Raises :class:`LeaseError` or :class:`LeaseLost` where the slots are not held any more."""
        if self.released:
            raise LeaseError("the lease is released", reason="RELEASED")
        if self.cache.session_number != self.binding.session:
            message = "the lease ended with the session it was granted in: the daemon restarted, or it was kicked"
            raise LeaseLost(message, reason="LEASE_LOST")

    async def release(self, *, stream: Stream | None = None) -> None:
        """Gives the slots back: see :meth:`kvtier.Cache.release`. Raises :class:`LeaseError` where that was done
        before. An empty lease has none to give: nothing happens."""
        if self.released and self.id:
            raise LeaseError("the lease is released", reason="RELEASED")
        await self.cache.release(self, stream=stream)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.cache.release(self)

    def _is_blank(self, index: int) -> bool:
        return False


class WriteLease(Lease):
    """Reserved slots: fill their views, then :meth:`commit`."""

    def __init__(
        self, cache: Cache, holdings: Holdings, binding: Binding, tier: Tier, lease_id: int, slots: Sequence[int]
    ) -> None:
        super().__init__(cache, holdings, binding, tier, lease_id, slots)
        self._blank = [True] * len(slots)
        self._given_back: set[int] = set()

    @property
    def blank(self) -> list[int]:
        """Indices of the slots that are not committed yet."""
        return [index for index, blank in enumerate(self._blank) if blank]

    async def commit(
        self,
        keys: Keys,
        *,
        parent: bytes | None = None,
        parents: Sequence[bytes | None] | None = None,
        priorities: int | Sequence[int] | None = None,
        retention: Retention | BlockRetention | None = None,
        prompt: Prompt | None = None,
        at: Sequence[int] | None = None,
        release: bool = False,
        stream: Stream | None = None,
        timeout: float | None = None,
    ) -> list[BlockResult]:
        """Makes slots blocks: immutable, reusable, still held by this lease. One result a key.

        By default the keys are a chain: each one's parent is the key before it, the first one's is ``parent`` (None:
        the first is a root). ``parents`` names one a key instead. ``priorities``: 0 to 100, one for all or one a key
        (default 35). ``retention``: instead of that, in tokens and with durations. ``prompt``: what the keys are of,
        for a cache that tells more than keys in its events. ``at``: indices of the slots, by default the first blank
        ones in order. ``release``: the lease ends with this call, whatever the results; else a slot whose result is
        PARENT_MISSING or PARENT_CONFLICT stays blank. One whose result is EXISTS has gone back to the daemon.

        Where the slots are memory of a GPU, the call is sent once ``stream`` has done what it was given before it: see
        :meth:`kvtier.Cache.fence` for which streams that can be. Who is cancelled, or runs out of time (``timeout``
        counts both), before that has happened has sent nothing: the slots are blank and held, and the commit may be
        made again.

        Raises :class:`InvalidArgument`, :class:`LeaseError`, :class:`LeaseLost`, :class:`kvtier.errors.DeviceError`.
        """
        self.require_live()
        indices = self.blank if at is None else self._places(at)
        results = await self._holdings.commit(
            self, keys, indices, parent, parents, priorities, retention, prompt, release, stream, timeout
        )
        for index, result in zip(indices, results, strict=False):
            self._blank[index] = result in _STAYS_BLANK
            if result is BlockResult.EXISTS:
                self._given_back.add(index)
        return results

    def view(self, index: int) -> list[View]:
        self.require_live()
        self._require_index("index", index)
        if index in self._given_back:
            raise LeaseError("the slot is not held any more: its key was stored already", reason="GIVEN_BACK")
        return super().view(index)

    def _is_blank(self, index: int) -> bool:
        return self._blank[index]

    def _places(self, at: Sequence[int]) -> list[int]:
        for number, index in enumerate(at):
            self._require_index(f"at[{number}]", index)
        return list(at)


class ReadLease(Lease):
    """Acquired blocks: READY in one tier, and they stay there."""

    def __init__(
        self,
        cache: Cache,
        holdings: Holdings,
        binding: Binding,
        tier: Tier,
        lease_id: int,
        slots: Sequence[int],
        *,
        keys: Sequence[bytes],
        generations: Sequence[int],
        found_in: bytes,
        matched: int,
        error: KvtierError | None,
        first_block: int = 0,
    ) -> None:
        super().__init__(cache, holdings, binding, tier, lease_id, slots)
        self.keys = tuple(keys)
        """Of the blocks that are held."""
        self.first_block = first_block
        """Where in the chain they begin: above 0 only in a sliding window group, acquired across groups."""
        self.trimmed = 0
        """How many of the first ones have been given back by :meth:`trim`."""
        self.generations = np.array(generations, dtype=np.uint64)
        self.found_in = found_in
        """Residency set at the moment of the match, one byte a block of the prefix."""
        self.matched = matched
        """Length of the stored prefix at that moment; more than :attr:`blocks` where room was short."""
        self.error = error
        """What ``acquire`` of this chain alone would have raised; None where it was not refused."""

    @property
    def refusal(self) -> str:
        """Why less than ``min_blocks`` was to be had; empty where it was not refused."""
        return "" if self.error is None else self.error.reason

    @property
    def blocks(self) -> int:
        """How many blocks are held."""
        return len(self.slots) - self.trimmed

    async def trim(self, blocks: int, *, stream: Stream | None = None, timeout: float | None = None) -> None:
        """Gives back the first ``blocks`` of those held, which a sequence has left behind its window.

        Indices stay what they were. At least one block stays held: :meth:`release` gives back all. ``stream`` as there.
        Raises :class:`InvalidArgument`, :class:`LeaseError`, :class:`LeaseLost`.
        """
        self.require_live()
        limit = f"1 to {self.blocks - 1}: of {self.blocks} held, one must stay"
        require_within("blocks", blocks, 1, self.blocks - 1, limit)
        await self._holdings.trim(self, blocks, stream, timeout)

    def view(self, index: int) -> list[View]:
        self.require_live()
        self._require_index("index", index)
        if index < self.trimmed:
            raise LeaseError("the slot is not held any more: the lease was trimmed", reason="GIVEN_BACK")
        return super().view(index)

    def unchanged(self) -> bool:
        """Whether every slot held still has the block that was acquired. To be asked before and after a copy."""
        slots = np.array(self.slots[self.trimmed :], dtype=np.intp)
        now = self.arena.generations(self.tier, self.cache.group, slots)
        return bool(np.array_equal(now, self.generations[self.trimmed :]))


class Held(Generic[T]):
    """What ``reserve`` and ``acquire`` return: await it for the lease, or enter it to have it released at the end."""

    def __init__(self, take: Callable[[], Awaitable[T]], give_back: Callable[[T], Awaitable[None]]) -> None:
        self._take = take
        self._give_back = give_back
        self._held: list[T] = []

    async def take(self) -> T:
        """The lease, the caller's to release."""
        return await self._take()

    async def give_back(self, lease: T) -> None:
        """Releases what :meth:`take` returned."""
        await self._give_back(lease)

    def __await__(self) -> Generator[Any, None, T]:
        return self.take().__await__()

    async def __aenter__(self) -> T:
        lease = await self._take()
        self._held.append(lease)
        return lease

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._give_back(self._held.pop())
