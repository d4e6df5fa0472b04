"""Leases for callers without an event loop."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Final, Generic, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvtier import lease as inner
from kvtier.arena import Arena, Memory, View
from kvtier.chains import Prompt
from kvtier.errors import KvtierError
from kvtier.gpu import Stream
from kvtier.retention import BlockRetention, Retention
from kvtier.sync.loop import LoopThread
from kvtier.types import BlockResult, Tier
from kvtier.wire import Keys, packed_keys

if TYPE_CHECKING:
    import torch

    from kvtier.sync.cache import Cache

L = TypeVar("L", bound=inner.Lease)


class Lease(Generic[L]):
    """Slots of one tier, held until :meth:`release` or the end of the ``with`` block; see :class:`kvtier.lease.Lease`.

    In a forked child it can neither be used nor released: the parent holds it.
    """

    def __init__(self, thread: LoopThread, cache: Cache, lease: L) -> None:
        self.cache: Final = cache
        self._thread = thread
        self.inner: Final = lease

    @property
    def id(self) -> int:
        return self.inner.id

    @property
    def tier(self) -> Tier:
        return self.inner.tier

    @property
    def slots(self) -> tuple[int, ...]:
        return self.inner.slots

    @property
    def released(self) -> bool:
        return self.inner.released

    @property
    def arena(self) -> Arena:
        return self.inner.arena

    def __len__(self) -> int:
        return len(self.inner)

    @property
    def memory(self) -> Memory | None:
        """What its slots are mapped to; None where they are not mapped."""
        return self.inner.memory

    def view(self, index: int) -> list[View]:
        """See :meth:`kvtier.lease.Lease.view`."""
        return self.inner.view(index)

    def tensors(self, index: int) -> list[torch.Tensor]:
        """See :meth:`kvtier.lease.Lease.tensors`."""
        return self.inner.tensors(index)

    def require_live(self) -> None:
        """Raises :class:`LeaseError` or :class:`LeaseLost` where the slots are not held any more."""
        self.inner.require_live()

    def release(self, *, stream: Stream | None = None) -> None:
        """Gives the slots back: see :meth:`kvtier.lease.Lease.release`."""
        fence = self._thread.fence([self.inner], stream)
        self._thread.run(lambda: self.inner.release(stream=fence))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._thread.forked:
            self.cache.release(self)


class WriteLease(Lease[inner.WriteLease]):
    """Reserved slots: fill their views, then :meth:`commit`."""

    @property
    def blank(self) -> list[int]:
        """Indices of the slots that are not committed yet."""
        return self.inner.blank

    def commit(
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
        """See :meth:`kvtier.lease.WriteLease.commit`."""
        packed, fence = packed_keys(keys), self._thread.fence([self.inner], stream)
        return self._thread.run(
            lambda: self.inner.commit(
                packed,
                parent=parent,
                parents=parents,
                priorities=priorities,
                retention=retention,
                prompt=prompt,
                at=at,
                release=release,
                stream=fence,
                timeout=timeout,
            )
        )


class ReadLease(Lease[inner.ReadLease]):
    """Acquired blocks: READY in one tier, and they stay there."""

    @property
    def keys(self) -> tuple[bytes, ...]:
        """Of the blocks that are held."""
        return self.inner.keys

    @property
    def first_block(self) -> int:
        """Where in the chain they begin: above 0 only in a sliding window group, acquired across groups."""
        return self.inner.first_block

    @property
    def trimmed(self) -> int:
        """How many of the first ones have been given back by :meth:`trim`."""
        return self.inner.trimmed

    def trim(self, blocks: int, *, stream: Stream | None = None, timeout: float | None = None) -> None:
        """See :meth:`kvtier.lease.ReadLease.trim`."""
        fence = self._thread.fence([self.inner], stream)
        self._thread.run(lambda: self.inner.trim(blocks, stream=fence, timeout=timeout))

    @property
    def generations(self) -> NDArray[np.uint64]:
        return self.inner.generations

    @property
    def found_in(self) -> bytes:
        """Residency set at the moment of the match, one byte a block of the prefix."""
        return self.inner.found_in

    @property
    def matched(self) -> int:
        """Length of the stored prefix at that moment; more than :attr:`blocks` where room was short."""
        return self.inner.matched

    @property
    def error(self) -> KvtierError | None:
        """What ``acquire`` of this chain alone would have raised; None where it was not refused."""
        return self.inner.error

    @property
    def refusal(self) -> str:
        """Why less than ``min_blocks`` was to be had; empty where it was not refused."""
        return self.inner.refusal

    @property
    def blocks(self) -> int:
        """How many blocks are held."""
        return self.inner.blocks

    def unchanged(self) -> bool:
        """Whether every slot still holds the block that was acquired. To be asked before and after a copy."""
        return self.inner.unchanged()


class Leases(list[ReadLease]):
    """What ``acquire_many`` returns: its leases, released together at the end of a ``with`` block."""

    def __init__(self, thread: LoopThread, cache: Cache, leases: Iterable[inner.ReadLease]) -> None:
        super().__init__(ReadLease(thread, cache, lease) for lease in leases)
        self._thread = thread
        self._cache = cache

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._thread.forked:
            self._cache.release(*self)
