"""The two sockets of vLLM's events: a PUB for batches as they come, a ROUTER for those that somebody missed.

PUB sends ``topic | number, 8 bytes big-endian | batch``. It waits for nobody: what a subscriber is too slow for is
dropped on the way to that subscriber, which sees a hole in the numbers.

ROUTER takes a request, ``(empty frame) | number`` from which on batches are wanted, and answers with batches as PUB
sent them, an empty frame before each, and at the end with one whose number is all ones and that has no bytes. Where
some that are asked for are no longer held, which is so for everybody who comes late, the answer is the present state
instead, from an ``AllBlocksCleared`` on, under the last numbers that were given out: a reader that applies it is where
the next batch goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final

import zmq

from kvtier.bridge.history import History, Seq
from kvtier.bridge.vllm_events import Step
from kvtier.bridge.vllm_form import AllBlocksCleared, VllmEvent

BATCH_WEIGHT: Final = 4096
"""A batch is closed once it tells of so many blocks."""

REQUEST_BYTES: Final = 8
END: Final = b"\xff" * REQUEST_BYTES
"""The number of the frame that ends an answer."""

STALLED_S: Final = 2.0
"""A reader that takes nothing of its answer for so long gets no more of it: others wait for theirs."""

_PAUSE_S: Final = 0.005

Encode = Callable[[Sequence[VllmEvent]], bytes]
"""Events to the bytes of a batch."""


@dataclass(slots=True, frozen=True)
class Sockets:
    """``pub`` and ``replay`` are bound and belong to whoever made them. ``replay``: None = nobody can ask.

    ``topic_in_answers``: vLLM's answers have the topic since 0.26.
    """

    pub: zmq.Socket[bytes]
    replay: zmq.Socket[bytes] | None
    topic: bytes
    topic_in_answers: bool


class Publisher:
    """Publishes steps, and answers who missed some. Of one loop.

    ``everything``: steps that tell the present state, as of all that was published.
    """

    def __init__(
        self,
        sockets: Sockets,
        history: History,
        encode: Encode,
        everything: Callable[[], Iterable[Step]],
        heartbeat_s: float,
    ) -> None:
        self._sockets = sockets
        self._history = history
        self._encode = encode
        self._everything = everything
        self._heartbeat_s = heartbeat_s
        self._steps: list[Step] = []
        self._told = asyncio.Event()

    def tell(self, steps: Iterable[Step]) -> None:
        """What :meth:`publish` is to publish next."""
        self._steps.extend(steps)
        if self._steps:
            self._told.set()

    async def publish(self) -> None:
        """Publishes what it is told, all of a turn of the loop together, until it is cancelled.

        Where it stays quiet for ``heartbeat_s`` an empty batch goes out: a reader that lost the last one before would
        not see a hole until something happens.
        """
        while True:
            try:
                async with asyncio.timeout(self._heartbeat_s):
                    await self._told.wait()
            except TimeoutError:
                self._send([])
                continue
            self._told.clear()
            self._flush()

    async def answer(self) -> None:
        """Answers requests, one after another, until it is cancelled."""
        replay = self._sockets.replay
        if replay is None:
            return
        loop, news = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(replay.fileno(), news.set)
        try:
            while True:
                # The descriptor tells of changes only, and sending takes them away: ask until there is nothing.
                news.clear()
                while (request := _received(replay)) is not None:
                    await self._serve(replay, *request)
                await news.wait()
        finally:
            loop.remove_reader(replay.fileno())

    def _flush(self) -> None:
        steps, self._steps = self._steps, []
        for events in batches(steps):
            self._send(events)

    def _send(self, events: Sequence[VllmEvent]) -> None:
        payload = self._encode(events)
        number = self._history.add(payload)
        self._sockets.pub.send_multipart([self._sockets.topic, _packed(number), payload])

    async def _serve(self, replay: zmq.Socket[bytes], reader: bytes, start: int) -> None:
        prefix = [self._sockets.topic] if self._sockets.topic_in_answers else []
        for number, payload in list(self._missed(start)):
            if not await _sent(replay, [reader, b"", *prefix, _packed(number), payload]):
                return
        await _sent(replay, [reader, b"", *([b""] if prefix else []), END, b""])

    def _missed(self, start: int) -> Iterator[tuple[Seq, bytes]]:
        self._flush()  # the present state is that of everything that was told
        history = self._history
        if start >= history.oldest:
            yield from history.since(start)
            return
        numbers = range(start, history.next)
        state = _fitted(list(batches(self._everything())), len(numbers))
        yield from zip(map(Seq, numbers[-len(state) :]), map(self._encode, state), strict=True)


def batches(steps: Iterable[Step]) -> Iterator[list[VllmEvent]]:
    """As few as it takes; a step is never cut."""
    batch: list[VllmEvent] = []
    weight = 0
    for step in steps:
        batch.extend(step)
        weight += sum(1 if isinstance(event, AllBlocksCleared) else len(event.block_hashes) for event in step)
        if weight >= BATCH_WEIGHT:
            yield batch
            batch, weight = [], 0
    if batch:
        yield batch


def _fitted(state: list[list[VllmEvent]], most: int) -> list[list[VllmEvent]]:
    """As at most ``most`` batches, in order."""
    each = -(-len(state) // most)
    return [list(chain(*state[place : place + each])) for place in range(0, len(state), each)]


def _received(replay: zmq.Socket[bytes]) -> tuple[bytes, int] | None:
    """Who asks, and from which number on; None where nobody does. What makes no sense is not answered."""
    while True:
        try:
            reader, *frames = replay.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None
        # AIBrix leaves the empty frame out.
        if len(frames) in (1, 2) and len(frames[-1]) == REQUEST_BYTES and not any(frames[:-1]):
            return reader, int.from_bytes(frames[-1], "big")


async def _sent(replay: zmq.Socket[bytes], frames: Sequence[bytes]) -> bool:
    """False where the reader is gone, or takes nothing."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(STALLED_S):
            while True:
                try:
                    replay.send_multipart(frames, zmq.NOBLOCK)
                    return True
                except zmq.Again:  # its queue is full
                    await asyncio.sleep(_PAUSE_S)
                except zmq.ZMQError as error:
                    if error.errno != zmq.EHOSTUNREACH:
                        raise
                    return False
    return False


def _packed(number: Seq) -> bytes:
    return number.to_bytes(REQUEST_BYTES, "big")
