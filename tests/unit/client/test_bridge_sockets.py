"""The bridge's sockets: numbers without holes, what a slow subscriber misses, and how it gets it back."""

import asyncio
import contextlib
import stat
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import zmq

from kvtier.bridge import Options
from kvtier.bridge.publisher import BATCH_WEIGHT, END, HISTORY_BYTES, Publisher, batches, bound, sockets
from kvtier.bridge.vllm import AllBlocksCleared, BlockRemoved, BlockStored, Step
from kvtier.errors import InvalidArgument
from tests import vllm_reader
from tests.integration.waiting import PATIENCE_S
from tests.vllm_reader import MAPS, Router

TOPIC = b"kv@pod@model"
PATIENCE_MS = int(PATIENCE_S * 1000)


def block(number: int, tokens: int = 2) -> Step:
    return [BlockStored([number], None, [1] * tokens, tokens, None, "GPU", None, None, 0, "full_attention", None)]


@dataclass
class Stage:
    """A publisher with sockets on loopback. ``numbers``: blocks told of so far, which is what ``everything`` tells."""

    publisher: Publisher
    numbers: list[int]
    context: zmq.Context[zmq.Socket[bytes]]
    where: str
    replay: str

    async def publish(self, numbers: range, tokens: int = 2) -> None:
        """A batch each."""
        for number in numbers:
            self.numbers.append(number)
            self.publisher.publish([block(number, tokens)])
            await asyncio.sleep(0)

    def subscriber(self, **options: int) -> zmq.Socket[bytes]:
        socket = self.context.socket(zmq.SUB)
        for name, value in options.items():
            socket.setsockopt(getattr(zmq, name), value)
        socket.setsockopt(zmq.SUBSCRIBE, b"kv@")
        socket.connect(self.where)
        return socket

    async def asked(self, start: int, *envelope: bytes) -> list[list[bytes]]:
        """The answer to a request, its end included."""
        with self.context.socket(zmq.DEALER) as socket:
            socket.connect(self.replay)
            socket.send_multipart([*envelope, start.to_bytes(8, "big")])
            frames = [await received(socket)]
            while frames[-1][-2] != END:
                frames.append(await received(socket))
        return frames


async def received(socket: zmq.Socket[bytes]) -> list[bytes]:
    """The next message, however long it takes, with the loop going on meanwhile."""
    assert await asyncio.to_thread(socket.poll, PATIENCE_MS), "nothing came"
    return socket.recv_multipart()


@asynccontextmanager
async def stage(
    hwm: int = 1000,
    *,
    history: int = HISTORY_BYTES,
    first: int = 0,
    heartbeat: float = 3600.0,
    replay_topic: bool = True,
) -> AsyncIterator[Stage]:
    place = "tcp://127.0.0.1:*"
    options = Options(place, place, topic=TOPIC.decode(), replay_topic=replay_topic)
    with sockets(options, hwm) as ends, zmq.Context() as context, pytest.MonkeyPatch.context() as patched:
        patched.setattr("kvtier.bridge.publisher.HEARTBEAT_S", heartbeat)
        patched.setattr("kvtier.bridge.publisher.HISTORY_BYTES", history)
        for socket in (ends.pub, ends.router):
            socket.setsockopt(zmq.SNDBUF, 4096)  # else the kernel takes megabytes for a reader that does not
        numbers: list[int] = []

        def everything() -> Iterator[Step]:
            yield [AllBlocksCleared()]
            yield from map(block, numbers)

        publisher = Publisher(ends, options, everything, first)
        tasks = [asyncio.create_task(publisher.beat()), asyncio.create_task(publisher.answer())]
        assert ends.replay is not None
        try:
            yield Stage(publisher, numbers, context, ends.endpoint, ends.replay)
        finally:
            for task in tasks:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
            context.destroy(linger=0)


async def joined(on: Stage, subscriber: zmq.Socket[bytes], number: int = 10**6) -> int:
    """Publishes until the subscriber has got something; the number of the batch that it got last."""
    async with asyncio.timeout(PATIENCE_S):
        while not subscriber.poll(5):
            await on.publish(range(number, number + 1))
            number += 1
    return seq(await received(subscriber))


def seq(frames: list[bytes]) -> int:
    return int.from_bytes(frames[1], "big")


async def test_batches_are_numbered_without_a_hole() -> None:
    async with stage() as on:
        subscriber = on.subscriber()
        last = await joined(on, subscriber)
        await on.publish(range(1, 4))
        frames = [await received(subscriber)]
        while seq(frames[-1]) < on.publisher.next - 1:
            frames.append(await received(subscriber))
        assert {each[0] for each in frames} == {TOPIC}
        assert [seq(each) for each in frames] == list(range(last + 1, on.publisher.next))


async def test_a_quiet_bridge_shows_where_it_is() -> None:
    async with stage(heartbeat=0.02) as on:
        subscriber = on.subscriber()
        first, second = await received(subscriber), await received(subscriber)
        assert seq(second) == seq(first) + 1
        assert MAPS.decode(second[2]).events == []


@pytest.mark.parametrize("replay_topic", [True, False])
async def test_what_is_held_is_answered_as_it_was_sent(replay_topic: bool) -> None:
    """A topic in front since vLLM 0.26; an empty frame before all; and with or without one in the request."""
    async with stage(replay_topic=replay_topic) as on:
        await on.publish(range(5))
        for envelope in ((b"",), ()):
            *held, end = await on.asked(2, *envelope)
            assert [int.from_bytes(each[-2], "big") for each in held] == [2, 3, 4]
            assert {tuple(each[:-2]) for each in held} == {(b"", TOPIC) if replay_topic else (b"",)}
            assert [end] == await on.asked(5) == [[b"", *([b""] if replay_topic else []), END, b""]]


async def test_who_asks_for_what_is_gone_is_told_the_present_state() -> None:
    async with stage(history=1000) as on:
        await on.publish(range(100))
        *state, _ = await on.asked(0, b"")
        assert int.from_bytes(state[-1][-2], "big") == 99
        router = Router()
        for each in state:
            router.apply(each[-1])
        assert router.listing == {(0, number): {"GPU"} for number in range(100)}


async def test_the_present_state_fits_into_the_numbers_that_are_missing() -> None:
    async with stage(history=1) as on:
        await on.publish(range(10_000))
        for start in (0, 1):
            *state, _ = await on.asked(start, b"")
            numbers = [int.from_bytes(each[-2], "big") for each in state]
            last = on.publisher.next - 1
            assert numbers == list(range(last - len(numbers) + 1, last + 1)) and numbers[0] >= start


async def test_a_subscriber_that_was_too_slow_gets_what_it_missed() -> None:
    """PUB waits for nobody: what it dropped leaves a hole in the numbers, which the answer fills."""
    async with stage(hwm=1) as on:
        subscriber, router = on.subscriber(RCVHWM=1, RCVBUF=4096), Router()
        last = await joined(on, subscriber)
        for frames in (await on.asked(0, b""))[: last + 1]:
            router.apply(frames[-1])
        await on.publish(range(60), tokens=50_000)  # 3 MB that nobody reads
        holes, tick = 0, 10**7
        while router.listing.keys() != {(0, number) for number in on.numbers}:
            if not subscriber.poll(50):
                await on.publish(range(tick, tick + 1))
                tick += 1
                continue
            frames = await received(subscriber)
            if seq(frames) > last + 1:
                holes += 1
                *missed, _ = await on.asked(last + 1, b"")
                for each in missed:
                    router.apply(each[-1])
                last += len(missed)
            elif seq(frames) == last + 1:
                router.apply(frames[2])
                last += 1
        assert holes, "it was never too slow"


async def test_requests_that_make_no_sense_are_not_answered_and_harm_nobody() -> None:
    async with stage() as on:
        await on.publish(range(2))
        with on.context.socket(zmq.DEALER) as socket:
            socket.connect(on.replay)
            for frames in ([b""], [b"", b"short"], [b"x", bytes(8)], [b"", b"", bytes(8)], [bytes(9)]):
                socket.send_multipart(frames)
            socket.send_multipart([b"", bytes(8)])
            assert (await received(socket))[-2] == bytes(8)


async def test_one_that_takes_nothing_of_its_answer_delays_others_but_for_a_while() -> None:
    async with stage(hwm=1) as on:
        await on.publish(range(60), tokens=50_000)
        with on.context.socket(zmq.DEALER) as stuck:
            stuck.setsockopt(zmq.RCVHWM, 1)
            stuck.setsockopt(zmq.RCVBUF, 4096)
            stuck.connect(on.replay)
            stuck.send_multipart([b"", bytes(8)])
            await received(stuck)  # it is being answered
            *_, last, _ = await on.asked(59, b"")
            assert int.from_bytes(last[-2], "big") == 59


async def test_who_asks_before_anything_was_told_is_told_that_nothing_is_there() -> None:
    async with stage(first=1000) as on:
        only, _ = await on.asked(0, b"")
        assert int.from_bytes(only[-2], "big") == 999
        assert MAPS.decode(only[-1]).events == [vllm_reader.AllBlocksCleared()]


async def test_so_many_bytes_are_held() -> None:
    async with stage(history=1000) as on:
        await on.publish(range(5), tokens=200)
        assert on.publisher.oldest in (1, 2, 3)
        await on.publish(range(5, 6), tokens=5000)
        assert on.publisher.oldest == 5


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:5557", "tcp://[::1]:5557", "tcp://localhost:1", "ipc:///run/x"])
def test_places_of_this_host_are_fine(endpoint: str) -> None:
    assert Options(endpoint, endpoint).endpoint == endpoint


@pytest.mark.parametrize("endpoint", ["tcp://*:5557", "tcp://[::]:1", "tcp://10.0.0.1:1", "tcp://eth0:1"])
def test_places_that_others_reach_are_asked_for(endpoint: str) -> None:
    with pytest.raises(InvalidArgument, match="insecure-any"):
        Options(endpoint)
    assert Options(endpoint, insecure_any=True).endpoint == endpoint


@pytest.mark.parametrize(
    "endpoint", ["", "5557", "tcp://127.0.0.1", "tcp://127.0.0.1:x", "udp://127.0.0.1:1", "ipc://"]
)
def test_what_is_no_place_is_refused(endpoint: str) -> None:
    with pytest.raises(InvalidArgument, match="ADDRESS:PORT"):
        Options(endpoint, insecure_any=True)


def test_a_file_is_its_owner_s_alone_and_a_taken_place_is_said(short_dir: Path) -> None:
    with zmq.Context() as context, context.socket(zmq.PUB) as one, context.socket(zmq.PUB) as other:
        assert bound(one, "endpoint", f"ipc://{short_dir}/events") == f"ipc://{short_dir}/events"
        assert stat.S_IMODE((short_dir / "events").stat().st_mode) == 0o600
        where = bound(one, "endpoint", "tcp://127.0.0.1:*")
        with pytest.raises(InvalidArgument, match="in use"):
            bound(other, "endpoint", where)


def test_removed_is_weighed_too() -> None:
    """Else a reset of a large cache would be one batch of any size."""
    steps: list[Step] = [[BlockRemoved(list(range(1024)), "GPU", 0)]] * 9

    def weight(batch: Step) -> int:
        return sum(len(each.block_hashes) for each in batch if isinstance(each, BlockRemoved))

    assert [weight(batch) for batch in batches(steps)] == [BATCH_WEIGHT, BATCH_WEIGHT, 1024]
