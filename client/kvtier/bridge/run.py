"""The bridge: one cache's events, from a daemon to vLLM's sockets, over restarts and gaps."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass

import msgspec
import zmq

from kvtier.aio import AsyncClient
from kvtier.bridge.history import History
from kvtier.bridge.places import bound, check
from kvtier.bridge.publisher import Encode, Publisher, Sockets
from kvtier.bridge.vllm_events import Naming, VllmEvents
from kvtier.bridge.vllm_form import Encoding, VllmEvent, batch_of
from kvtier.events import Gap


@dataclass(slots=True, frozen=True)
class Wire:
    """Where to publish, and in which form.

    ``replay_endpoint``: None = nobody can ask. ``anywhere``: whether others than this host may reach the endpoints.
    ``topic_in_answers``: as vLLM's since 0.26. ``rank``: data-parallel. ``high_water_mark``: batches on the way to a
    reader before some are dropped, or, of an answer, held back. Raises :class:`kvtier.errors.InvalidArgument` for an
    endpoint that may not be.
    """

    endpoint: str
    replay_endpoint: str | None
    anywhere: bool
    topic: str
    encoding: Encoding
    topic_in_answers: bool
    rank: int
    buffer_steps: int
    high_water_mark: int
    heartbeat_s: float

    def __post_init__(self) -> None:
        check("endpoint", self.endpoint, anywhere=self.anywhere)
        if self.replay_endpoint is not None:
            check("replay_endpoint", self.replay_endpoint, anywhere=self.anywhere)


@dataclass(slots=True, frozen=True)
class Bound:
    """Where the sockets are, with the ports that were chosen."""

    endpoint: str
    replay_endpoint: str | None


class Bridge:
    """One cache's events on vLLM's sockets: bound when it is entered, published while it runs.

    ``on_gap`` is told of each gap; the difference that it made is published as soon as it is known.
    """

    def __init__(
        self, client: AsyncClient, cache: str, naming: Naming, wire: Wire, on_gap: Callable[[Gap], None]
    ) -> None:
        self._client = client
        self._cache = cache
        self._naming = naming
        self._wire = wire
        self._on_gap = on_gap

    async def run(self, on_bound: Callable[[Bound], None]) -> None:
        """Until it is cancelled. ``on_bound`` is told where the sockets are.

        Raises :class:`kvtier.errors.InvalidArgument` where they cannot be bound, :class:`PermissionDenied`.
        """
        with self._sockets() as (sockets, place):
            on_bound(place)
            events = VllmEvents(self._naming)
            # Above all numbers of an earlier bridge: its readers see a hole and ask, instead of taking our batches for
            # its next ones, or for old ones.
            history = History(self._wire.buffer_steps, first=time.time_ns() // 1000)
            publisher = Publisher(sockets, history, self._encoder(), events.everything, self._wire.heartbeat_s)
            tasks = [asyncio.ensure_future(work) for work in (publisher.publish(), publisher.answer())]
            tasks.append(asyncio.ensure_future(self._follow(events, publisher)))
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            finally:
                for task in tasks:
                    task.cancel()
                ends = await asyncio.gather(*tasks, return_exceptions=True)
        for end in ends:
            if isinstance(end, Exception):
                raise end

    async def _follow(self, events: VllmEvents, publisher: Publisher) -> None:
        while True:
            watch = self._client.watch(snapshot=True, caches=[self._cache])
            async with aclosing(watch):
                async for item in watch:
                    if isinstance(item, Gap):
                        self._on_gap(item)
                        break  # a snapshot says what was missed
                    publisher.tell(events.of(item))

    @contextmanager
    def _sockets(self) -> Iterator[tuple[Sockets, Bound]]:
        wire = self._wire
        with zmq.Context() as context, context.socket(zmq.PUB) as pub, context.socket(zmq.ROUTER) as router:
            for socket in (pub, router):
                socket.setsockopt(zmq.LINGER, 0)
                socket.setsockopt(zmq.SNDHWM, wire.high_water_mark)
                socket.setsockopt(zmq.IPV6, 1)
            router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # else what does not fit is dropped, the end of an answer too
            replay, asked = wire.replay_endpoint, None
            where = bound(pub, "endpoint", wire.endpoint)
            if replay is not None:
                asked = bound(router, "replay_endpoint", replay)
            sockets = Sockets(pub, router if replay is not None else None, wire.topic.encode(), wire.topic_in_answers)
            yield sockets, Bound(where, asked)

    def _encoder(self) -> Encode:
        encode = msgspec.msgpack.Encoder().encode

        def encoded(events: Sequence[VllmEvent]) -> bytes:
            return encode(batch_of(events, self._wire.encoding, time.time(), self._wire.rank))

        return encoded
