"""``kvtier.v1.Transfer``: blocks whose bytes come and go in the stream.

A transfer holds a lease of the caller's session. Before every chunk it checks the lease and the caller's right, which
a reload of the rules may revoke. There is no ``await`` between the check and the copy, and leases end on the same loop,
so a transfer never reads or writes a slot that now belongs to another holder. A revoked right stops a put before its
commit. A chunk is small: copying it on the loop costs about as much as handing it to a thread. A thread copies to and
from GPU memory; a lease that ends during the copy ends after it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

import grpc
import numpy as np
import xxhash

from kvtier.abi.stream import CHECKSUM_BYTES, Progress, Span
from kvtier.v1 import blocks_pb2, transfer_pb2
from kvtierd.core.errors import UnknownLease
from kvtierd.core.ids import DEVICE, KEY_BYTES, GroupId, Key, LeaseId, SlotId, Tier
from kvtierd.mover.engine import Engine
from kvtierd.mover.executor import UnknownCache
from kvtierd.mover.runtime import GpuCopies, Stretch, Unaccounted
from kvtierd.rights import Right
from kvtierd.service import validation
from kvtierd.service.cache import ServedCache
from kvtierd.service.calls import Access
from kvtierd.service.catalog import Catalog
from kvtierd.service.errors import bad_argument, refused
from kvtierd.service.servicers.blocks import BlocksService, Caps, leasable
from kvtierd.service.sessions import ClientSession, require_attached
from kvtierd.tiers.base import Bytes, MemoryStore, TierIOError
from kvtierd.tiers.remote import objects
from kvtierd.tiers.remote.objects import GroupPrefix


@dataclass(slots=True, frozen=True)
class _Held:
    """Slots that a transfer holds. ``generations``: of READY slots; empty for blank slots. ``require_right``: raises
    PERMISSION_DENIED if the session has lost its right to the transfer."""

    session: ClientSession
    cache: ServedCache
    group: GroupId
    tier: Tier
    lease: LeaseId
    slots: Sequence[SlotId]
    require_right: Callable[[], None]
    generations: Sequence[int] = ()

    @property
    def block_bytes(self) -> int:
        return self.cache.spec.block_bytes(self.group)

    def require_live(self) -> None:
        """Raises like a unary call if the session is gone or orphaned, or has lost the right or the lease."""
        require_attached(self.session)
        self.require_right()
        if self.lease not in self.cache.runtime.manager.leases:
            raise UnknownLease(self.lease)

    def stretches(self, spans: Iterable[Span]) -> list[Stretch]:
        """The slots' stretches for the spans. Raises AssertionError if a READY slot has changed."""
        for span in spans if self.generations else ():
            slot, generation = self.slots[span.block], self.generations[span.block]
            if self.cache.runtime.arena.generation(self.tier, self.group, slot) != generation:
                raise AssertionError(f"{self.tier} slot {slot} changed under lease {self.lease}")
        return [Stretch(self.slots[span.block], span.start, span.stop) for span in spans]


@dataclass(slots=True, frozen=True, eq=False)
class TransferService:
    """``_wait_s``: seconds that a call without a timeout waits for room."""

    _engine: Engine
    _catalog: Catalog
    _access: Access
    _blocks: BlocksService
    _wait_s: float
    _caps: Caps

    async def put(
        self, session: ClientSession, header: transfer_pb2.PutHeader, chunks: AsyncIterator[transfer_pb2.BlockBytes]
    ) -> transfer_pb2.PutResponse:
        """Commits all blocks in one step, after every byte has been verified."""
        commit = header.commit
        if commit.slots or commit.lease_id:
            raise bad_argument(
                "header.commit.lease_id", commit.lease_id, "absent, as are slots: the call reserves them"
            )
        cache = self._catalog.opened(session, commit.cache_id)
        group = validation.group("header.group", header.group, cache)
        tier = validation.tier("header.tier", header.tier, leasable(cache))
        keys = validation.keys("header.commit.keys", commit.keys, max_keys=cache.slots[tier][group])
        items = validation.commit_items(cache, commit, range(len(keys)))  # refuse before the first byte arrives
        checksums = _checksums(header.checksums, len(keys))
        wait_s = validation.timeout_s("header.timeout_ns", header.timeout_ns, self._wait_s)
        with self._caps.reserving(session, cache, group, tier, len(keys)):
            grant = await self._engine.reserve(cache.id, session.id, group, tier, len(keys), wait_s, items[0].parent)
        lease = LeaseId(grant.lease or 0)
        try:
            held = _Held(session, cache, group, tier, lease, grant.slots, self._right(session, Right.WRITE, cache))
            await _receive(held, self._bytes(held), checksums, chunks)
            held.require_live()
            commit.lease_id = lease
            commit.slots.extend(grant.slots)
            if cache.options.checksum_bytes:
                commit.checksums = header.checksums
            done = await self._blocks.commit(session, commit)
            return transfer_pb2.PutResponse(results=done.results, as_of_event=done.as_of_event)
        except Unaccounted as error:
            raise TierIOError(0, str(error)) from error
        finally:
            self._release(session, cache, lease)

    async def get(self, session: ClientSession, request: transfer_pb2.GetRequest) -> AsyncGenerator[bytes, None]:
        acquire = request.acquire
        validation.count("acquire.chains", len(acquire.chains), 1, 1)
        cache = self._catalog.opened(session, acquire.cache_id)
        groups = validation.groups("acquire.groups", cache, acquire.groups)
        tier = validation.tier("acquire.tier", acquire.tier, leasable(cache))
        (chain,) = (await self._blocks.acquire(session, acquire, bring=not request.objects)).chains
        right = self._right(session, Right.READ, cache)
        parts = [
            _Held(
                *(session, cache, group, tier, LeaseId(part.lease_id), list(map(SlotId, part.slots)), right),
                generations=list(part.generations),
            )
            for group, part in zip(groups, chain.groups, strict=False)  # a refused chain has none
        ]
        try:
            yield _header(chain).SerializeToString()
            for held in parts:
                header = None if not request.objects else self._header_of(held, acquire.chains[0].keys, chain.blocks)
                async for chunk in _chunks(held, self._bytes(held), header):
                    yield chunk
        finally:
            for held in parts:
                if held.lease:
                    self._release(session, cache, held.lease)

    def _bytes(self, held: _Held) -> SlotBytes:
        """Returns access to the slots. The caller releases the lease by :meth:`Engine.afterwards`."""
        runtime, session = held.cache.runtime, held.session.id
        if held.tier is DEVICE and runtime.cuda is not None:
            return _OnGpu(partial(self._engine.while_held, runtime.id, session, held.lease), runtime.cuda, held.group)
        return _Mapped(runtime.memory(held.tier), held.group)

    def _header_of(self, held: _Held, packed: bytes, length: int) -> Callable[[int], bytes]:
        """Returns a function from the number of a held block to its object's header; empty if the block was dropped.

        Args:
            packed: the keys of the chain.
            length: blocks of the acquired prefix; the lease holds the blocks that the group needs for it.
        """
        cache, group = held.cache, held.group
        needed = cache.spec.attention(group).needs(length).cut(packed, KEY_BYTES)
        place = GroupPrefix(cache.name, cache.fingerprint, group)
        private = self._access.may(held.session, Right.TOKENS, cache.name)

        def header(number: int) -> bytes:
            key = Key(needed[number * KEY_BYTES : (number + 1) * KEY_BYTES])
            found = self._engine.manager(cache.id).attributes(group, key)
            if found is None:
                return b""
            parent, traits = found
            if not private and traits.label is not None:
                traits = traits._replace(label=replace(traits.label, tokens=b"", scope=b""))
            return objects.header(place, key, parent, traits, held.block_bytes)

        return header

    def _right(self, session: ClientSession, right: Right, cache: ServedCache) -> Callable[[], None]:
        """Returns a check of the right, to be repeated: rules may change during a stream."""
        return partial(self._access.require_on, session, right, cache.name)

    def _release(self, session: ClientSession, cache: ServedCache, lease: LeaseId) -> None:
        def release() -> None:
            with suppress(UnknownLease, UnknownCache):  # ended with the session, or with the daemon
                self._engine.release(cache.id, session.id, [lease])

        self._engine.afterwards(cache.id, lease, release)


async def _receive(
    held: _Held, slots: SlotBytes, checksums: Sequence[bytes], chunks: AsyncIterator[transfer_pb2.BlockBytes]
) -> None:
    """Fills the slots. Returns after all bytes have arrived and match their checksums, and the sender has ended."""
    progress = Progress(len(held.slots), held.block_bytes)
    digest = xxhash.xxh3_128()
    async for chunk in chunks:
        data = np.frombuffer(chunk.data, dtype=np.uint8)
        spans = progress.accept(chunk.block, chunk.offset, len(data))
        held.require_live()
        written = await slots.write(held.stretches(spans), data)
        for span, parts in zip(spans, written, strict=True):
            for part in parts:
                digest.update(part.data)  # the bytes in the slot, not the bytes sent
            if span.stop == held.block_bytes:
                _require_checksum(span.block, digest.digest(), checksums[span.block])
                digest.reset()
    progress.require_finished()


async def _chunks(
    held: _Held, slots: SlotBytes, header: Callable[[int], bytes] | None = None
) -> AsyncGenerator[bytes, None]:
    """Yields the bytes of the slots, each chunk a copy made under the lease. ``header``: see :meth:`_header_of`."""
    progress = Progress(len(held.slots), held.block_bytes)
    digest = xxhash.xxh3_128()
    while not progress.finished:
        block, offset = progress.block, progress.offset
        pieces: list[Bytes] = []
        checksums = b""
        headers: list[bytes] = []
        held.require_live()
        spans = progress.take()
        for span, parts in zip(spans, await slots.read(held.stretches(spans)), strict=True):
            if header is not None and span.start == 0:
                headers.append(header(span.block))
                digest.update(headers[-1])
            for piece in parts:
                digest.update(piece.data)
                pieces.append(piece)
            if span.stop == held.block_bytes:
                checksums += digest.digest()
                digest.reset()
        part = transfer_pb2.BlockBytes(block=block, offset=offset, data=b"".join(piece.data for piece in pieces))
        yield transfer_pb2.GetChunk(bytes=part, checksums=checksums, headers=headers).SerializeToString()


def _header(chain: blocks_pb2.AcquiredChain) -> transfer_pb2.GetChunk:
    """The first chunk: the chain that was found, without the fields that are of use only to the lease's holder."""
    for part in chain.groups:
        for field in ("lease_id", "slots", "generations"):
            part.ClearField(field)
    return transfer_pb2.GetChunk(header=transfer_pb2.GetHeader(found=chain))


def _checksums(packed: bytes, count: int) -> list[bytes]:
    if len(packed) != count * CHECKSUM_BYTES:
        limit = f"{count * CHECKSUM_BYTES} bytes: {CHECKSUM_BYTES} a key"
        raise bad_argument("header.checksums", f"{len(packed)} bytes", limit)
    return [packed[start : start + CHECKSUM_BYTES] for start in range(0, len(packed), CHECKSUM_BYTES)]


def _require_checksum(block: int, found: bytes, said: bytes) -> None:
    if found != said:
        field = f"header.checksums[{block}]"
        about = {"field": field, "value": said.hex(), "limit": f"{found.hex()}, which its bytes have"}
        message = f"block {block}: its bytes are not what {field} says; nothing was stored"
        raise refused(grpc.StatusCode.DATA_LOSS, "CHECKSUM_MISMATCH", message, **about)


@dataclass(slots=True, frozen=True)
class _Mapped:
    """Access to one group's slots in one memory tier. Loop thread only. Copies without an ``await``, so that a check
    before the call holds until it returns. Raises :class:`~kvtierd.tiers.base.TierIOError` if the memory fails."""

    _memory: MemoryStore
    _group: GroupId

    async def read(self, stretches: Sequence[Stretch]) -> list[list[Bytes]]:
        """The bytes of each stretch in one or more arrays, which do not change until the next ``await``."""
        return [list(self._parts(stretch)) for stretch in stretches]

    async def write(self, stretches: Sequence[Stretch], data: Bytes) -> list[list[Bytes]]:
        """Fills the stretches in order. Returns the bytes written to each, like :meth:`read`."""
        written = await self.read(stretches)
        start = 0
        for parts in written:
            for part in parts:
                np.copyto(part, data[start : start + len(part)])
                start += len(part)
        return written

    def _parts(self, stretch: Stretch) -> Iterator[Bytes]:
        end = 0
        for part in self._memory.parts(self._group, stretch.slot):
            begin, end = end, end + len(part)
            if stretch.start < end and stretch.stop > begin:
                yield part[max(stretch.start - begin, 0) : stretch.stop - begin]


@dataclass(slots=True, frozen=True)
class _OnGpu:
    """Like :class:`_Mapped`, in a thread. The slots stay held until the copy has ended, even if their session ends
    before. After a write that raises :class:`~kvtierd.mover.runtime.Unaccounted`, they must not be granted again.
    """

    _in_thread: Callable[[Callable[[], Bytes]], Awaitable[Bytes]]
    _copies: GpuCopies
    _group: GroupId

    async def read(self, stretches: Sequence[Stretch]) -> list[list[Bytes]]:
        fetch = partial(self._copies.fetch, self._group, stretches)
        return _apart(stretches, await self._in_thread(fetch))

    async def write(self, stretches: Sequence[Stretch], data: Bytes) -> list[list[Bytes]]:
        return _apart(stretches, await self._in_thread(partial(self._copies.put, self._group, stretches, data)))


SlotBytes = _Mapped | _OnGpu


def _apart(stretches: Sequence[Stretch], data: Bytes) -> list[list[Bytes]]:
    ends = np.cumsum([stretch.nbytes for stretch in stretches])
    return [[part] for part in np.split(data, ends[:-1])]
