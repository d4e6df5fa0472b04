"""A peer as a store of objects: blocks in any of its tiers can be read, and nothing can be written."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Final, NoReturn

import grpc
from grpc.aio import AioRpcError, UsageError

from kvtier.abi.spec import CacheSpec, SpecError
from kvtier.abi.stream import CHECKSUM_BYTES, Progress, StreamError
from kvtier.deadline import Deadline
from kvtier.errors import DaemonError, KvtierError, NotFound, PermissionDenied, chain_error
from kvtier.session import Session
from kvtier.transport import Link
from kvtier.v1 import blocks_pb2, caches_pb2, common_pb2, transfer_pb2
from kvtier.wire import granted
from kvtierd.core.ids import Key
from kvtierd.fleet.peers import Peer
from kvtierd.tiers.remote.base import ABSENT, Listed, RemoteError, RemoteRefused, RemoteUnavailable
from kvtierd.tiers.remote.objects import GroupPrefix, parse

GET_S: Final = 30.0
"""Timeout of a stream in seconds; the caller's own is shorter."""

CLOSE_S: Final = 2.0
MOST_BLOCKS: Final = 1_024
"""Most blocks in a stream: the peer holds them until the stream ends."""


@dataclass(slots=True)
class _Wanted:
    """A requested object. ``nbytes``: its length after it has arrived, ``ABSENT`` before."""

    number: int
    key: Key
    into: memoryview
    nbytes: int = ABSENT

    def begin(self, header: bytes, block_bytes: int) -> int:
        """Returns the payload's offset in the buffer; 0 = the block is gone, or its object longer than the buffer."""
        start = CHECKSUM_BYTES + len(header)
        if not header or start + block_bytes > len(self.into):
            self.nbytes = start + block_bytes if header else ABSENT
            return 0
        self.into[CHECKSUM_BYTES:start] = header
        return start

    def end(self, checksum: bytes, nbytes: int) -> None:
        self.into[:CHECKSUM_BYTES] = checksum
        self.nbytes = nbytes


_Call = grpc.aio.UnaryStreamCall[transfer_pb2.GetRequest, transfer_pb2.GetChunk]


class PeerStore:
    """Implements :class:`kvtierd.tiers.remote.base.RemoteStore`, for reads. Loop thread only."""

    replaces: Final = False

    def __init__(self, peer: Peer) -> None:
        self._peer: Final = peer

    async def exists(self, names: Sequence[str]) -> Sequence[bool]:
        """Answers from the peer's mirror, without a call."""
        return [bool(self._known(name)) for name in names]

    async def get(self, names: Sequence[str], into: Sequence[memoryview]) -> Sequence[int]:
        """Reads consecutive names of a cache's window group in one stream. In a chained group, every block after the
        first missing block is ``ABSENT``: the peer drops a block with its descendants."""
        asked = [
            (place, _Wanted(number, key, buffer))
            for number, (name, buffer) in enumerate(zip(names, into, strict=True))
            for place, key in self._known(name)
        ]
        for place, run in groupby(asked, key=itemgetter(0)):
            await self._fetch(place, [one for _, one in run])
        found = {one.number: one.nbytes for _, one in asked}
        return [found.get(number, ABSENT) for number in range(len(names))]

    async def begins(self, names: Sequence[str], nbytes: int) -> Sequence[bytes]:
        self._refuse("read in parts")

    async def put(self, names: Sequence[str], objects: Sequence[bytes]) -> Sequence[RemoteError | None]:
        self._refuse("written to")

    async def delete(self, names: Sequence[str]) -> None:
        self._refuse("deleted from")

    def listing(self, prefix: str) -> AsyncIterator[Listed]:
        self._refuse("listed")

    async def close(self) -> None:
        """Does nothing: the session belongs to the fleet."""

    def _refuse(self, what: str) -> NoReturn:
        raise RemoteRefused(f"peer {self._peer.address} cannot be {what}: it looks after its blocks itself")

    def _known(self, name: str) -> list[tuple[GroupPrefix, Key]]:
        """The object's place and key; empty if the peer lacks the block. Raises RemoteUnavailable, RemoteRefused."""
        parsed = parse(name)
        if parsed is None:
            return []
        place, key = parsed
        if not self._peer.gives(place.cache, place.fingerprint, place.revision):
            return []  # the peer's block may be forgotten, there or here
        view = self._peer.exact(place.cache, place.fingerprint)
        return [] if view is None or view.block(key, group=place.group) is None else [parsed]

    async def _fetch(self, place: GroupPrefix, wanted: Sequence[_Wanted]) -> None:
        session = self._peer.session
        if session is None:
            raise RemoteUnavailable(f"peer {self._peer.address} is away")
        try:
            await session.call(lambda link: _get(session, link, place, wanted), Deadline(GET_S))
        except PermissionDenied as error:
            raise RemoteRefused(f"peer {self._peer.address}: {error}") from error
        except NotFound:
            pass  # the cache was removed meanwhile
        except KvtierError as error:
            raise RemoteUnavailable(f"peer {self._peer.address}: {error}") from error


async def _get(session: Session, link: Link, place: GroupPrefix, wanted: Sequence[_Wanted]) -> None:
    """Opens the cache only while it reads, so that clients of the peer can remove the cache."""
    opening = asyncio.ensure_future(_open(session, link, place.cache))
    try:
        opened = await asyncio.shield(opening)  # a cancelled caller closes the cache, too
        spec = _told_spec(opened.info)
        if spec.fingerprint() != place.fingerprint:
            return
        attention = spec.attention(place.group)
        step = attention.span or MOST_BLOCKS  # a longer chain would get only the blocks of its last window
        tiers = [tier.tier for tier in opened.info.groups[place.group].tiers]
        tier = common_pb2.TIER_HOST if common_pb2.TIER_HOST in tiers else common_pb2.TIER_DEVICE
        for start in range(0, len(wanted), step):
            left = wanted[start : start + step]
            while left:
                acquire = blocks_pb2.AcquireRequest(
                    cache_id=opened.cache_id,
                    groups=[place.group],
                    tier=tier,
                    chains=[blocks_pb2.Chain(keys=b"".join(one.key for one in left), min_blocks=1, counted=True)],
                )
                came = await _stream(link, acquire, left, spec.block_bytes(place.group))
                if attention.chained and came < len(left):
                    return
                left = left[came + 1 :]
    finally:
        session.spawn(_close(session, link, opening))


async def _open(session: Session, link: Link, cache: str) -> caches_pb2.OpenResponse:
    request = caches_pb2.OpenRequest(name=cache, seq=session.next_seq())
    return await link.stubs.caches.Open(request, metadata=link.metadata)


def _told_spec(info: caches_pb2.CacheInfo) -> CacheSpec:
    """The cache's specification. Raises :class:`DaemonError` if it is invalid or has another number of groups."""
    spec = CacheSpec.of(info.spec)
    try:
        spec.validate()
    except SpecError as error:
        raise DaemonError(f"a cache without a specification: {error}", reason="BAD_ANSWER") from error
    if len(info.groups) != len(spec.groups):
        says = f"{len(info.groups)} window groups of a cache that has {len(spec.groups)}"
        raise DaemonError(says, reason="BAD_ANSWER")
    return spec


async def _close(session: Session, link: Link, opening: asyncio.Future[caches_pb2.OpenResponse]) -> None:
    with suppress(AioRpcError, UsageError, TimeoutError):  # the end of the session closes the cache, too
        async with asyncio.timeout(CLOSE_S):
            request = caches_pb2.CloseRequest(cache_id=(await opening).cache_id, seq=session.next_seq())
            await link.stubs.caches.Close(request, metadata=link.metadata)


async def _stream(link: Link, acquire: blocks_pb2.AcquireRequest, wanted: Sequence[_Wanted], block_bytes: int) -> int:
    """Fills the buffers of the blocks that the peer gives of a chain. Returns the length of the prefix found there."""
    request = transfer_pb2.GetRequest(acquire=acquire, objects=True)
    call = link.stubs.transfer.Get(request, metadata=link.metadata)
    try:
        first = await call.read()
        if not isinstance(first, transfer_pb2.GetChunk) or not first.HasField("header"):
            raise DaemonError("a stream that does not begin with its header", reason="BAD_ANSWER")
        found = first.header.found
        if found.refusal:
            error = chain_error(found, 1)
            if isinstance(error, NotFound):
                return 0
            raise error
        if len(found.groups) != 1:
            raise DaemonError(f"{len(found.groups)} groups of a chain in one group", reason="BAD_ANSWER")
        there = granted(found, found.groups[0]).pick(wanted)
        await _receive(call, there, block_bytes)
        return found.blocks
    finally:
        call.cancel()


async def _receive(call: _Call, wanted: Sequence[_Wanted], block_bytes: int) -> None:
    """Assembles each object in its buffer. The reader verifies objects, as it does for every store."""
    progress, start = Progress(len(wanted), block_bytes), 0
    while isinstance(chunk := await call.read(), transfer_pb2.GetChunk):
        headers, ends, offset = iter(chunk.headers), 0, 0
        try:
            spans = progress.accept(chunk.bytes.block, chunk.bytes.offset, len(chunk.bytes.data))
            for span in spans:
                one, length = wanted[span.block], span.stop - span.start
                if span.start == 0:
                    start = one.begin(next(headers), block_bytes)
                if start:
                    one.into[start + span.start : start + span.stop] = chunk.bytes.data[offset : offset + length]
                offset += length
                if span.stop == block_bytes:
                    if start:
                        one.end(chunk.checksums[ends : ends + CHECKSUM_BYTES], start + block_bytes)
                    ends += CHECKSUM_BYTES
        except (StreamError, StopIteration, ValueError) as error:
            raise DaemonError(f"a stream of objects that does not add up: {error!r}", reason="BAD_ANSWER") from error
    if not progress.finished:
        raise DaemonError(f"a stream that ended in block {progress.block} of {len(wanted)}", reason="BAD_ANSWER")
