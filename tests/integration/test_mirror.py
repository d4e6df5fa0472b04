"""Mirrors of real daemons: what they say is what the daemons list, block by block, whatever happens to either."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

import pytest

from kvtier import (
    BlockResult,
    Client,
    Cursor,
    Event,
    LeaseLost,
    Mirror,
    MirrorState,
    NotFound,
    PermissionDenied,
    RetryableError,
    Tier,
    connect,
    rank_mirrors,
    sync,
)
from kvtier.abi.words import TIERS
from tests.events_page import told
from tests.integration.blocks import SPEC, blocks, chain, opened_cache, sizes
from tests.integration.load import CHAIN_BLOCKS, Load
from tests.integration.models import VSWA, by_hand, content, groups_of
from tests.integration.raw import attached
from tests.integration.seeing import last_event
from tests.integration.steering import Steering
from tests.integration.test_rights import ALL, ONE, change_rules
from tests.integration.test_slow_watchers import BLOCKS, NAME, SMALL_RING, store
from tests.integration.waiting import PATIENCE_S, eventually, patient

SMALL = sizes(device=12, host=24, disk=48)
ROOM = ("--device", "stand-in=2MiB", "--host-bytes", "4MiB", "--disk-bytes", "8MiB")
WINDOWS = by_hand(VSWA, device=24, host=32, disk=48)


@pytest.fixture
def steering(monkeypatch):
    return Steering().installed(monkeypatch)


async def caught_up(mirror, client):
    await mirror.synced(await last_event(client), timeout=PATIENCE_S)


async def until(mirror, state):
    await eventually(lambda: mirror.state, lambda found: found is state)


class Sequences:
    """Somebody who works on a cache of several windows and never stops: chains stored over all groups, some beginning
    where others end, priorities that expire, moves and drops."""

    def __init__(self, client, name, seed):
        self.client, self.name = client, name
        self.chains = [chain(f"{name} {number}", CHAIN_BLOCKS) for number in range(8)]
        self._rng = random.Random(seed)

    async def work(self):
        while True:
            try:
                cache = await self.client.open_cache(self.name, VSWA, budgets=WINDOWS)
                while True:
                    await self._rng.choice((self._put, self._put, self._retain, self._move, self._drop))(cache)
            except (RetryableError, NotFound, LeaseLost):
                continue  # no room now, or the cache or the daemon has gone: another operation, or the next life

    def _some(self):
        return self._rng.choice(self.chains)[: self._rng.randint(1, CHAIN_BLOCKS)]

    async def _put(self, cache):
        keys = self._some()
        await cache.across.put(keys, {group: content(VSWA, group, keys) for group in groups_of(VSWA)})

    async def _retain(self, cache):
        """For a moment: then the priority goes back, and that is an event as well."""
        group = cache.in_group(self._rng.choice(groups_of(VSWA)))
        await group.set_retention(self._some(), self._rng.randint(0, 100), self._rng.choice((None, 0.01, 0.1)))

    async def _move(self, cache):
        await cache.in_group(self._rng.choice(groups_of(VSWA))).move(self._some(), self._rng.choice(tuple(TIERS)))

    async def _drop(self, cache):
        await cache.in_group(self._rng.choice(groups_of(VSWA))).drop(self._some()[-1:])


@pytest.mark.parametrize("seed", [1, 2])
async def test_it_says_what_listings_say_while_everything_happens(start_daemon, steering, seed):
    daemon, rng = start_daemon(*ROOM, "--chaos-seed", str(seed)), random.Random(seed)
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(await patient(daemon.address))
        one = await client.open_cache("one", SPEC, budgets=SMALL)
        many = await client.open_cache("many", VSWA, budgets=WINDOWS)
        groups = [many.in_group(group) for group in groups_of(VSWA)]
        mirror = await stack.enter_async_context(Mirror(client, ["one", "many"], heartbeat_s=0.1))
        load = await stack.enter_async_context(Load(daemon.address, "one", chains=8, workers=2, seed=seed))
        sequences = Sequences(client, "many", seed)
        working = asyncio.create_task(sequences.work())
        stack.callback(working.cancel)

        async def reset():
            await many.reset(force=True)

        async def replace():
            await client.remove_cache("many", force=True)
            await client.open_cache("many", VSWA, budgets=WINDOWS)

        async def restart():
            await asyncio.to_thread(daemon.restart)

        async def kill():
            await asyncio.to_thread(daemon.crash)

        happenings: list[Callable[[], Awaitable[None]]] = [reset, restart, kill, restart, kill]
        rng.shuffle(happenings)
        for happening in [lambda: asyncio.sleep(0), *happenings]:
            await happening()
            for _ in range(3):
                await steering.assert_agrees(mirror, one, *groups)
                await asyncio.sleep(rng.uniform(0, 0.05))
            load.check()
            assert not working.done(), working.result()
        assert mirror.resyncs == 2, "a death loses what was not written down, and nothing else loses anything"

        working.cancel()
        await asyncio.wait([working])
        await load.stop()
        await steering.assert_agrees(mirror, one, *groups)
        await caught_up(mirror, client)
        for keys in sequences.chains:
            assert mirror.longest_prefix(keys, "many") == (await many.across.match(keys)).blocks
            for group in groups:
                found = await group.match(keys)
                assert mirror.match(keys, "many", group=group.group).blocks == found.blocks
        for name in load.living:
            keys = chain(name, CHAIN_BLOCKS)
            assert mirror.longest_prefix(keys, "one") == (await one.match(keys)).blocks
        assert await kinds(client) <= told(), "docs/events.md does not know of all that happens"


async def kinds(client):
    """Type and cause of every event that is held."""
    end, found = await last_event(client), set()
    async with client.watch(oldest=True) as watch, asyncio.timeout(PATIENCE_S):
        while watch.cursor is None or watch.cursor < end:
            item = await anext(watch)
            if isinstance(item, Event):
                found.add((str(item.type), str(item.cause)))
    return found


@pytest.mark.parametrize("log", ["0", "64MiB"])
async def test_what_it_was_too_slow_for_it_makes_up_for(start_daemon, steering, log):
    """With a snapshot where the daemon has forgotten it, and from its log where it has one."""
    daemon = start_daemon(*SMALL_RING, "--event-log-bytes", log, host=2 * BLOCKS)
    async with opened_cache(daemon.address, NAME, wait=PATIENCE_S) as (client, cache), attached(daemon.address) as raw:
        number = (await raw.open(NAME)).cache_id
        async with Mirror(client, [NAME]) as mirror:
            await store(raw, number, "first")
            await caught_up(mirror, client)
            steering.hold()
            for index in range(220):
                await store(raw, number, f"prompt {index}")
            assert mirror.longest_prefix(chain("first", BLOCKS)) == BLOCKS
            steering.go_to(None)
            await caught_up(mirror, client)
            assert mirror.resyncs == (1 if log == "0" else 0)
            await steering.assert_agrees(mirror, cache)
            assert mirror.longest_prefix(chain("prompt 219", BLOCKS)) == BLOCKS


async def test_caches_come_and_go_and_come_back_as_others(start_daemon, steering):
    daemon = start_daemon(*ROOM)
    keys = chain("one", 6)
    async with await patient(daemon.address) as client, Mirror(client, ["later"], heartbeat_s=0.1) as mirror:
        assert (mirror.state, mirror.longest_prefix(keys)) == (MirrorState.EXACT, 0)
        first = await client.open_cache("later", VSWA, budgets=WINDOWS)
        await first.across.put(keys, {group: content(VSWA, group, keys) for group in groups_of(VSWA)})
        await caught_up(mirror, client)
        assert mirror.longest_prefix(keys) == 6
        assert mirror.longest_prefix(keys, tiers=[Tier.DISK]) == 0
        await first.close()
        await client.remove_cache("later")
        await caught_up(mirror, client)
        assert (mirror.longest_prefix(keys), len(mirror)) == (0, 0)
        second = await client.open_cache("later", SPEC, budgets=SMALL)
        assert set(await second.put(keys[:4], blocks(keys[:4]), tier=Tier.HOST, priorities=70)) == {BlockResult.OK}
        await caught_up(mirror, client)
        assert (mirror.longest_prefix(keys), mirror.longest_prefix(keys, tiers=[Tier.DEVICE])) == (4, 0)
        assert mirror.block(keys[3]) == (keys[3], Tier.HOST.bit, 70)
        assert mirror.block(keys[4]) is None
        await steering.assert_agrees(mirror, second)
        assert mirror.resyncs == 0


async def test_a_right_that_goes_makes_it_stale_and_one_that_comes_back_exact(start_daemon, tmp_path):
    file = tmp_path / "kvtierd.toml"
    file.write_text(ALL)
    daemon = start_daemon("--config", str(file), "--listen-tcp", "127.0.0.1:0", "--tcp-insecure", host=16)
    keys = chain("right", 4)
    async with await patient(daemon.address) as owner, await connect(daemon.tcp_address, insecure=True) as router:
        cache = await owner.open_cache("other", SPEC, budgets=sizes(host=8))
        await cache.put(keys[:2], blocks(keys[:2]), tier=Tier.HOST)
        async with Mirror(router, ["other"], heartbeat_s=0.05) as mirror:
            await change_rules(daemon, file, ONE)
            await cache.put(keys, blocks(keys), tier=Tier.HOST)
            await until(mirror, MirrorState.STALE)
            assert mirror.longest_prefix(keys) == 2
            await eventually(lambda: mirror.problem, lambda problem: isinstance(problem, PermissionDenied))
            with pytest.raises(PermissionDenied):
                await Mirror(router, ["other"]).__aenter__()
            await change_rules(daemon, file, ALL)
            await mirror.synced(timeout=PATIENCE_S)
            assert (mirror.longest_prefix(keys), mirror.problem) == (4, None)


async def test_who_of_several_has_the_longest_prefix(start_daemon):
    daemons = {name: start_daemon(device=8, host=16, disk=32) for name in ("one", "two")}
    keys = chain("shared", 6)
    async with AsyncExitStack() as stack:
        clients = {n: await stack.enter_async_context(await patient(d.address)) for n, d in daemons.items()}
        caches = {name: await client.open_cache("c", SPEC) for name, client in clients.items()}
        await caches["one"].put(keys[:3], blocks(keys[:3]), tier=Tier.DEVICE)
        await caches["two"].put(keys, blocks(keys), tier=Tier.HOST)
        await caches["two"].move(keys[:1], Tier.DISK)
        mirrors = {
            name: await stack.enter_async_context(Mirror(client, ["c"], heartbeat_s=0.1))
            for name, client in clients.items()
        }
        two, one = rank_mirrors(mirrors, keys)
        assert (two.name, two.blocks, two.state, two.lag) == ("two", 6, MirrorState.EXACT, 0)
        assert two.by_tier == {Tier.DEVICE: 0, Tier.HOST: 5, Tier.DISK: 1}
        assert (one.name, one.blocks, one.by_tier[Tier.DEVICE]) == ("one", 3, 3)
        assert [each.name for each in rank_mirrors(mirrors, keys[:3])] == ["one", "two"], "it is faster there"


def test_threads_look_without_waiting_for_another(start_daemon):
    daemon = start_daemon(device=8, host=16, disk=32)
    keys = chain("threads", 6)
    with Client(daemon.address) as client, sync.SyncMirror(client, ["c"]) as mirror:
        cache = client.open_cache("c", SPEC)
        cache.put(keys, blocks(keys))
        stats = client.stats()
        mirror.synced(Cursor(stats.epoch, stats.last_event_id), timeout=PATIENCE_S)
        assert (str(mirror.state), mirror.lag, mirror.problem) == ("exact", 0, None)
        assert (mirror.longest_prefix(keys), len(mirror)) == (6, 6)
        assert {row.key for row in mirror.blocks()} == set(keys)
        (standing,) = rank_mirrors({"here": mirror}, keys)
        assert (standing.name, standing.blocks) == ("here", 6)
        cache.reset()
        stats = client.stats()
        mirror.synced(Cursor(stats.epoch, stats.last_event_id), timeout=PATIENCE_S)
        assert len(mirror) == 0
    assert mirror.state is MirrorState.STALE
