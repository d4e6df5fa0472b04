"""vLLM's two sockets: a PUB for new batches, a ROUTER for readers that missed batches.

PUB sends ``topic | number, 8 bytes big-endian | batch`` without waiting: a subscriber that is too slow misses batches
and sees a hole in the numbers.

ROUTER takes a request, ``(empty frame) | number``, and answers with all batches from that number on, each after an
empty frame, and last a batch whose number is all ones and whose content is empty. If some of these batches are no
longer held, the answer is the present state instead, from an ``AllBlocksCleared`` on, under the last numbers given out.
A reader that applies the state continues with the next batch.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Final, NamedTuple

import msgspec
import zmq
import zmq.asyncio

from kvtier.bridge import Options
from kvtier.bridge.vllm import AllBlocksCleared, Step, VllmEvent, VllmEvents, batch_of
from kvtier.client import AsyncClient
from kvtier.errors import InvalidArgument
from kvtier.events import Gap, WatchItem
from kvtier.mirror.follower import follow

HISTORY_BYTES: Final = 64 << 20
"""Most bytes of batches that are kept for readers; the last batch is always kept."""
HEARTBEAT_S: Final = 5.0
"""Seconds without events after which an empty batch shows readers whether they missed the last batch."""
BATCH_WEIGHT: Final = 4096
"""A batch is closed when its events have this many blocks."""
END: Final = b"\xff" * 8
"""The number in the frame that ends an answer."""
STALLED_S: Final = 2.0
"""Seconds after which an answer is abandoned if its reader takes nothing: other readers wait."""

_NUMBER_BYTES: Final = 8
_PAUSE_S: Final = 0.005
_OWNER_ONLY: Final = 0o177


class Sockets(NamedTuple):
    """vLLM's sockets, bound, and their endpoints. ``replay``: None = the router is not bound."""

    pub: zmq.Socket[bytes]
    router: zmq.asyncio.Socket
    endpoint: str
    replay: str | None


class Publisher:
    """Publishes steps, and answers readers that missed batches. Belongs to one event loop."""

    def __init__(
        self, sockets: Sockets, options: Options, everything: Callable[[], Iterable[Step]], first: int
    ) -> None:
        """Prepares a publisher on bound sockets.

        Args:
            everything: returns steps that describe the present state, after all published steps.
            first: the number of the first batch.
        """
        self._pub = sockets.pub
        self._router = sockets.router
        self._options = options
        self._topic = options.topic.encode()
        self._everything = everything
        self._encode = msgspec.msgpack.Encoder().encode
        self._held: deque[bytes] = deque()
        self._bytes = 0
        self._quiet_since = time.monotonic()
        self.next = first

    @property
    def oldest(self) -> int:
        """The number of the oldest held batch; :attr:`next` if there is none."""
        return self.next - len(self._held)

    def publish(self, steps: Iterable[Step]) -> None:
        for events in batches(steps):
            self._send(events)

    async def beat(self) -> None:
        """Sends an empty batch after each quiet time, so that a reader that lost the last batch sees a hole."""
        while True:
            quiet = time.monotonic() - self._quiet_since
            if quiet >= HEARTBEAT_S:
                self._send([])
            else:
                await asyncio.sleep(HEARTBEAT_S - quiet)

    async def answer(self) -> None:
        """Answers requests one after another. Ignores malformed requests."""
        while True:
            reader, *frames = await self._router.recv_multipart()
            # AIBrix omits the empty frame.
            if len(frames) in (1, 2) and len(frames[-1]) == _NUMBER_BYTES and not any(frames[:-1]):
                await self._serve(reader, int.from_bytes(frames[-1], "big"))

    def _send(self, events: Sequence[VllmEvent]) -> None:
        payload = self._encoded(events)
        self._pub.send_multipart([self._topic, _packed(self.next), payload])
        self.next += 1
        self._quiet_since = time.monotonic()
        self._held.append(payload)
        self._bytes += len(payload)
        while self._bytes > HISTORY_BYTES and len(self._held) > 1:
            self._bytes -= len(self._held.popleft())

    def _encoded(self, events: Sequence[VllmEvent]) -> bytes:
        return self._encode(batch_of(events, self._options.encoding, time.time(), self._options.data_parallel_rank))

    async def _serve(self, reader: bytes, start: int) -> None:
        topic, end = ([self._topic], [b""]) if self._options.replay_topic else ([], [])
        for number, payload in list(self._missed(start)):
            if not await self._sent([reader, b"", *topic, _packed(number), payload]):
                return
        await self._sent([reader, b"", *end, END, b""])

    def _missed(self, start: int) -> Iterator[tuple[int, bytes]]:
        """Batches from ``start`` on, or the present state in at most as many batches."""
        if start >= self.oldest:
            yield from ((number, self._held[number - self.oldest]) for number in range(start, self.next))
            return
        state = list(batches(self._everything()))
        each = -(-len(state) // (self.next - start))
        merged = [list(chain(*state[place : place + each])) for place in range(0, len(state), each)]
        yield from zip(range(self.next - len(merged), self.next), map(self._encoded, merged), strict=True)

    async def _sent(self, frames: Sequence[bytes]) -> bool:
        """Sends frames to a reader. Returns False if the reader is gone or takes nothing."""
        give_up = time.monotonic() + STALLED_S
        while time.monotonic() < give_up:
            try:
                await self._router.send_multipart(frames, zmq.NOBLOCK)
                return True
            except zmq.Again:  # its queue is full
                await asyncio.sleep(_PAUSE_S)
            except zmq.ZMQError as error:
                if error.errno != zmq.EHOSTUNREACH:
                    raise
                return False
        return False


def batches(steps: Iterable[Step]) -> Iterator[Step]:
    """Joins steps to batches of at least ``BATCH_WEIGHT`` blocks, except the last. A step is never split."""
    batch: Step = []
    weight = 0
    for step in steps:
        batch.extend(step)
        weight += sum(1 if isinstance(event, AllBlocksCleared) else len(event.block_hashes) for event in step)
        if weight >= BATCH_WEIGHT:
            yield batch
            batch, weight = [], 0
    if batch:
        yield batch


def _packed(number: int) -> bytes:
    return number.to_bytes(_NUMBER_BYTES, "big")


async def run(
    client: AsyncClient,
    cache: str,
    options: Options,
    on_bound: Callable[[str, str | None], None],
    on_gap: Callable[[Gap], None],
) -> None:
    """Publishes a cache's events until it is cancelled.

    Args:
        on_bound: called with the endpoints, including chosen ports.
        on_gap: called with each gap; the resulting differences are published as soon as they are known.

    Raises:
        InvalidArgument: an endpoint cannot be bound.
        PermissionDenied: the client has no right to watch the cache.
    """
    with sockets(options) as on:
        on_bound(on.endpoint, on.replay)
        events = VllmEvents(options)
        # Above all numbers of an earlier bridge, so that its readers see a hole and send a request.
        publisher = Publisher(on, options, events.everything, time.time_ns() // 1000)

        def take(item: WatchItem) -> None:
            if isinstance(item, Gap):
                on_gap(item)
            publisher.publish(events.of(item))

        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(follow(client, cache, take))
                tasks.create_task(publisher.beat())
                if on.replay is not None:
                    tasks.create_task(publisher.answer())
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from failed.exceptions[0].__cause__


@contextmanager
def sockets(options: Options, high_water_mark: int = 1000) -> Iterator[Sockets]:
    with zmq.Context() as context, context.socket(zmq.PUB) as pub, zmq.asyncio.Socket(context, zmq.ROUTER) as router:
        for socket in (pub, router):
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.SNDHWM, high_water_mark)
            socket.setsockopt(zmq.IPV6, 1)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # else ZeroMQ drops messages beyond its queue, maybe an answer's end
        replay = options.replay_endpoint
        where = bound(pub, "endpoint", options.endpoint)
        asked = None if replay is None else bound(router, "replay_endpoint", replay)
        yield Sockets(pub, router, where, asked)


def bound(socket: zmq.Socket[bytes] | zmq.asyncio.Socket, field: str, endpoint: str) -> str:
    """Binds a socket and returns its endpoint. Only the owner can open the file of an ``ipc://`` endpoint."""
    mask = os.umask(_OWNER_ONLY)
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        raise InvalidArgument(field, endpoint, f"an address that can be bound: {error.strerror}") from error
    finally:
        os.umask(mask)
    return re.sub(r"\[::ffff:([\d.]+)\]", r"\1", socket.getsockopt_string(zmq.LAST_ENDPOINT))
