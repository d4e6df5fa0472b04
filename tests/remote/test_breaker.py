"""A store behind its breaker, on a clock that the test moves."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress

import pytest

from kvtierd.tiers.remote.base import Listed, RemoteError, RemoteFull, RemoteRefused, RemoteUnavailable
from kvtierd.tiers.remote.breaker import FAILURES, FIRST_BACKOFF_S, LAST_BACKOFF_S, Guarded

DOWN, REFUSED, FULL = RemoteUnavailable("down"), RemoteRefused("wrong keys"), RemoteFull("no room")


class Moody:
    """A store that fails with ``mood``, hangs while it is an event, and counts the calls that reached it."""

    def __init__(self) -> None:
        self.mood: Exception | asyncio.Event | None = None
        self.put_mood: RemoteError | None = None
        self.calls = 0

    replaces = True

    async def _do(self) -> None:
        self.calls += 1
        if isinstance(self.mood, asyncio.Event):
            await self.mood.wait()
        elif self.mood:
            raise self.mood

    async def exists(self, names: Sequence[str]) -> Sequence[bool]:
        await self._do()
        return [True for _ in names]

    async def get(self, names: Sequence[str], into: Sequence[memoryview]) -> Sequence[int]:
        await self._do()
        return [100 for _ in names]

    async def begins(self, names: Sequence[str], nbytes: int) -> Sequence[bytes]:
        await self._do()
        return [bytes(nbytes) for _ in names]

    async def put(self, names: Sequence[str], objects: Sequence[bytes]) -> Sequence[RemoteError | None]:
        await self._do()
        if self.put_mood:
            raise self.put_mood
        return [None for _ in names]

    async def delete(self, names: Sequence[str]) -> None:
        await self._do()

    async def listing(self, prefix: str) -> AsyncIterator[Listed]:
        for i in range(3):
            await self._do()
            yield Listed(f"{prefix}{i}", 1, 0.0)

    async def close(self) -> None:
        self.calls = -1


class Setup:
    """``chance`` 1: no part of a back-off is left out."""

    def __init__(self) -> None:
        self.now = 100.0
        self.store = Moody()
        self.guarded = Guarded(self.store, 30.0, lambda: self.now, lambda: 1.0)

    async def get(self) -> None:
        await self.guarded.get(["a"], [memoryview(bytearray(100))])

    async def put(self) -> None:
        await self.guarded.put(["a"], [b"12345"])

    async def fail(self, error: RemoteError = DOWN, times: int = FAILURES) -> None:
        self.store.mood = error
        for _ in range(times):
            with pytest.raises(type(error), match=str(error)):
                await self.get()

    def fail_but(self, good: str) -> list[str]:
        """Gets of all objects but one are refused from now on. Returns the names that are asked for."""
        asked: list[str] = []

        async def get(names: Sequence[str], into: Sequence[memoryview]) -> Sequence[int]:
            asked.extend(names)
            if names != [good]:
                raise RemoteRefused("sick", of_object=True)
            return [100]

        self.store.get = get  # type: ignore[method-assign]
        return asked

    async def reaches(self) -> bool:
        """Whether a get reaches the store."""
        before = self.store.calls
        with suppress(RemoteError):
            await self.get()
        return self.store.calls > before


async def test_an_error_that_no_store_should_raise_is_a_failed_call() -> None:
    store = Moody()
    guarded = Guarded(store, 1.0)
    store.mood = IndexError("list index out of range")
    for _ in range(FAILURES + 1):
        with pytest.raises(RemoteUnavailable, match="get: IndexError"):
            await guarded.get(["a"], [memoryview(bytearray(1))])
    assert store.calls == FAILURES


async def test_failures_in_a_row_open_the_circuit() -> None:
    it = Setup()
    await it.fail(times=FAILURES - 1)
    it.store.mood = None
    await it.get()  # not in a row any more
    await it.fail(times=FAILURES - 1)
    assert it.guarded.problem is None
    await it.fail(times=1)
    assert it.guarded.problem == "down"
    for call in (it.get, it.put, lambda: it.guarded.exists(["a"]), lambda: it.guarded.delete(["a"])):
        before = it.store.calls
        with pytest.raises(RemoteUnavailable, match="down"):
            await call()
        assert it.store.calls == before
    assert it.guarded.counts["get"].refused == it.guarded.counts["put"].refused == 1


async def test_it_heals_by_itself_after_a_back_off_that_doubles() -> None:
    it = Setup()
    await it.fail()
    backoff = FIRST_BACKOFF_S
    while backoff < LAST_BACKOFF_S:
        it.now += backoff * 0.99
        assert not await it.reaches()
        it.now += backoff * 0.02
        assert await it.reaches()  # one, which fails
        assert not await it.reaches()
        backoff *= 2
    it.now += LAST_BACKOFF_S * 1.01
    it.store.mood = None
    await it.get()
    assert it.guarded.problem is None
    assert [await it.reaches() for _ in range(5)] == [True] * 5
    await it.fail()  # and the back-off begins anew
    it.now += FIRST_BACKOFF_S * 1.01
    assert await it.reaches()


async def test_half_of_a_back_off_is_chance() -> None:
    it = Setup()
    it.guarded = Guarded(it.store, 30.0, lambda: it.now, lambda: 0.0)
    await it.fail()
    it.now += FIRST_BACKOFF_S * 0.49
    assert not await it.reaches()
    it.now += FIRST_BACKOFF_S * 0.02
    assert await it.reaches()


async def test_one_call_at_a_time_tries_an_open_circuit() -> None:
    it = Setup()
    await it.fail()
    it.now += FIRST_BACKOFF_S * 1.01
    it.store.mood = answered = asyncio.Event()
    trying = asyncio.create_task(it.get())
    await asyncio.sleep(0)
    assert not await it.reaches()
    trying.cancel()
    await asyncio.wait([trying])
    assert not await it.reaches()  # it was given up without an answer
    it.now += 2 * FIRST_BACKOFF_S * 1.01
    trying = asyncio.create_task(it.get())
    await asyncio.sleep(0)
    answered.set()
    await trying
    assert it.guarded.problem is None


async def test_a_refusal_opens_it_at_once() -> None:
    it = Setup()
    await it.fail(REFUSED, times=1)
    assert it.guarded.problem == "wrong keys"
    assert not await it.reaches()


@pytest.mark.parametrize("error", [FULL, REFUSED])
async def test_a_put_without_room_or_rights_stops_puts_alone(error: RemoteError) -> None:
    it = Setup()
    it.store.put_mood = error
    with pytest.raises(type(error)):
        await it.put()
    assert (it.guarded.problem, it.guarded.put_problem) == (None, str(error))
    assert await it.reaches()
    before = it.store.calls
    with pytest.raises(RemoteUnavailable, match=str(error)):
        await it.put()
    assert it.store.calls == before
    it.store.put_mood = None
    it.now += FIRST_BACKOFF_S * 1.01
    await it.put()
    assert it.guarded.put_problem is None


async def test_a_store_that_knows_objects_and_does_not_give_them_stops_gets_alone() -> None:
    it = Setup()
    for _ in range(FAILURES):
        await it.fail(times=1)
        it.store.mood = None
        await it.guarded.exists(["a"])
    assert (it.guarded.problem, it.guarded.put_problem) == ("down", None)
    assert not await it.reaches()
    await it.put()


@pytest.mark.parametrize("kind", [RemoteUnavailable, RemoteRefused])
async def test_an_error_is_the_object_s_until_another_has_it(kind: type[RemoteError]) -> None:
    it = Setup()
    it.store.mood = kind("sick", of_object=True)
    for _ in range(2 * FAILURES):
        with pytest.raises(kind):
            await it.get()
    assert it.guarded.problem is None
    for _ in range(FAILURES):
        with pytest.raises(RemoteError):
            await it.guarded.get(["b"], [memoryview(bytearray(100))])
    assert it.guarded.problem == "sick"


@pytest.mark.parametrize(("earlier", "good", "order"), [([], "b", ["a", "b"]), (["good"], "good", ["good"])])
async def test_a_probe_asks_for_another_object_each_time(earlier: list[str], good: str, order: list[str]) -> None:
    """Objects that came before the refusals are among them."""
    it = Setup()
    for name in earlier:
        await it.guarded.get([name], [memoryview(bytearray(100))])
    it.store.mood = RemoteRefused("sick", of_object=True)
    for name in ("a", "b"):
        with pytest.raises(RemoteRefused):
            await it.guarded.get([name], [memoryview(bytearray(100))])
    assert it.guarded.problem
    asked = it.fail_but(good)
    for _ in range(3):
        it.now += 2 * LAST_BACKOFF_S
        with suppress(RemoteRefused):
            await it.guarded.probe()
    assert asked == order
    assert it.guarded.problem is None


async def test_calls_that_were_given_up_are_failures_by_their_time() -> None:
    it = Setup()
    it.store.mood = asyncio.Event()
    for given_up in range(3):
        assert it.guarded.problem is None, given_up
        calling = asyncio.create_task(it.get())
        await asyncio.sleep(0)
        it.now += 10.0
        calling.cancel()
        await asyncio.wait([calling])
    assert it.guarded.problem == "get: no answer within 30 s"
    assert not await it.reaches()
    it.store.mood = None
    it.now += 2 * LAST_BACKOFF_S
    await it.guarded.probe()
    assert it.guarded.problem is None, "a store that was silent is found to be back"


async def test_a_probe_finds_out_that_it_is_back() -> None:
    it = Setup()
    await it.guarded.probe()
    assert it.store.calls == 0  # nothing is wrong
    await it.fail()
    for _ in range(2):
        it.now += LAST_BACKOFF_S
        with pytest.raises(RemoteUnavailable):
            await it.guarded.probe()
    it.store.mood = None
    it.now += LAST_BACKOFF_S
    await it.guarded.probe()
    assert it.guarded.problem is None


async def test_a_store_that_does_not_list_is_not_failing() -> None:
    it = Setup()
    it.store.mood = REFUSED
    with pytest.raises(RemoteRefused):
        [listed async for listed in it.guarded.listing("a/")]
    assert it.guarded.problem is None


async def test_calls_bytes_and_seconds_are_counted() -> None:
    it = Setup()
    await it.get()
    await it.put()
    await it.put()
    assert [listed.name async for listed in it.guarded.listing("a/")] == ["a/0", "a/1", "a/2"]
    await it.fail(times=1)
    got, put = it.guarded.counts["get"], it.guarded.counts["put"]
    assert (got.calls, got.failures, got.nbytes) == (2, 1, 100)
    assert (put.calls, put.failures, put.nbytes) == (2, 0, 10)
    it.store.mood = slow = asyncio.Event()
    reading = asyncio.create_task(it.get())
    await asyncio.sleep(0)
    it.now += 7.0
    slow.set()
    await reading
    assert it.guarded.counts["get"].seconds == 7.0
    await it.guarded.close()
    assert it.store.calls == -1
