"""A peer's blocks as objects of a store: from whatever tier they come, they are what the format says."""

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np
import pytest

from kvtier import CacheOptions, PoolSpec, Tier, WindowGroupSpec, connect
from kvtierd.core.ids import GroupId, Key
from kvtierd.fleet.peers import Fleet
from kvtierd.fleet.store import PeerStore
from kvtierd.tiers.remote.base import ABSENT, RemoteRefused, RemoteUnavailable
from kvtierd.tiers.remote.objects import GroupPrefix, decode, object_bytes, parse
from tests.integration.blocks import BLOCK_BYTES, SPEC, block, blocks, chain, opened_cache
from tests.integration.models import VSWA, by_hand, content, groups_of
from tests.integration.test_rights import change_rules
from tests.integration.waiting import PATIENCE_S, eventually

PLACE = GroupPrefix("c", SPEC.fingerprint(), GroupId(0))
ROOM = object_bytes(BLOCK_BYTES)
KEYS = [Key(key) for key in chain("peer", 6)]
RULE = "[[allow]]\nanonymous = true\ncaches = ['*']\nverbs = [{verbs}]\n"


@pytest.fixture
def far(start_daemon, tmp_path):
    rules = tmp_path / "rules.toml"
    rules.write_text(RULE.format(verbs="'read', 'watch'"))
    room = ("--host-bytes", "4MiB", "--disk-bytes", "8MiB")
    return start_daemon("--config", str(rules), "--listen-tcp", "127.0.0.1:0", "--tcp-insecure", *room)


@asynccontextmanager
async def peer_of(daemon, spec=SPEC, name="c"):
    """The store over a daemon, whose blocks of a cache are known."""
    fleet = Fleet([daemon.tcp_address], None, lambda: {name: spec.fingerprint()}, 0)
    fleet.start()
    try:
        (peer,) = fleet.peers
        await eventually(lambda: peer.status, lambda state: state == "exact")
        yield fleet, PeerStore(peer)
    finally:
        await fleet.stop()


async def known(store, names):
    await eventually(lambda: store.exists(names), all)


def buffers(count, nbytes=ROOM):
    return [memoryview(bytearray(nbytes)) for _ in range(count)]


async def test_a_chain_comes_as_objects_from_memory_and_disk(far):
    async with opened_cache(far.address, "c") as (owner, cache), peer_of(far) as (fleet, store):
        await cache.put(KEYS, blocks(KEYS), priorities=70)
        await cache.move(KEYS[4:], Tier.DISK)
        names = [PLACE.name(key) for key in (*KEYS, Key(bytes(32)))]
        await known(store, names[:-1])
        assert (await store.exists(names))[-1] is False
        into = buffers(len(names))
        lengths = await store.get(names, into)
        assert lengths[-1] == ABSENT
        for number, key in enumerate(KEYS):
            parent, traits, payload = decode(PLACE, key, BLOCK_BYTES, into[number][: lengths[number]])
            assert parent == (KEYS[number - 1] if number else None)
            assert (traits.priority, traits.label) == (70, None)
            assert np.array_equal(np.frombuffer(payload, np.uint8), block(key))
        (peer,) = fleet.peers
        assert peer.holding("c", PLACE.fingerprint, GroupId(0), KEYS)[0] == 6
        assert peer.holding("c", bytes(32), GroupId(0), KEYS)[0] == 0
        # A part of it, that does not begin at the root; and nobody is kept from removing the cache.
        assert (await store.get(names[3:5], buffers(2))) == lengths[3:5]
        await cache.close()
        await eventually(owner.caches, lambda found: found[0].sessions == 0)
        await owner.remove_cache("c")
        await eventually(lambda: store.exists(names), lambda found: not any(found))
        assert await store.get(names, into) == [ABSENT] * len(names)


async def test_a_buffer_that_is_too_small_is_not_filled(far):
    async with opened_cache(far.address, "c") as (_, cache), peer_of(far) as (_, store):
        await cache.put(KEYS[:2], blocks(KEYS[:2]))
        names = [PLACE.name(key) for key in KEYS[:2]]
        await known(store, names)
        (small,), (large,) = buffers(1, BLOCK_BYTES), buffers(1)
        lengths = await store.get(names, [small, large])
        assert lengths[0] > len(small) and not any(small)
        decode(PLACE, KEYS[1], BLOCK_BYTES, large[: lengths[1]])


async def test_each_group_of_windows_gives_its_own(far):
    async with await connect(far.address) as owner, peer_of(far, VSWA) as (_, store):
        cache = await owner.open_cache("c", VSWA, budgets=by_hand(VSWA, host=24, disk=24))
        keys = [Key(key) for key in chain("windows", 12)]
        await cache.across.put(keys, {group: content(VSWA, group, keys) for group in groups_of(VSWA)}, tier=Tier.HOST)
        for group in map(GroupId, groups_of(VSWA)):
            place, nbytes = GroupPrefix("c", VSWA.fingerprint(), group), VSWA.block_bytes(group)
            here = [key for key in keys if (await cache.in_group(group).locate([key]))[0].residency]
            names = [place.name(key) for key in here]
            await known(store, names)
            into = buffers(len(here), object_bytes(nbytes))
            lengths = await store.get(names, into)
            for key, buffer, length, wanted in zip(here, into, lengths, content(VSWA, group, here), strict=True):
                *_, payload = decode(place, key, nbytes, buffer[:length])
                assert np.array_equal(np.frombuffer(payload, np.uint8), np.asarray(wanted).reshape(-1).view(np.uint8))


@pytest.mark.parametrize("allowed", [False, True])
async def test_tokens_come_with_the_right_to_see_them(far, tmp_path, allowed):
    if allowed:
        await change_rules(far, tmp_path / "rules.toml", RULE.format(verbs="'read', 'watch', 'tokens'"))
    async with await connect(far.address) as owner, peer_of(far) as (_, store):
        cache = await owner.open_cache("c", SPEC, options=CacheOptions(keep_tokens=True, event_hash="v2_sha256"))
        prompt = cache.prompt(list(range(SPEC.tokens_per_block)))
        keys = [Key(prompt.keys)]
        await cache.put(keys, blocks(keys), prompt=prompt)
        await known(store, [PLACE.name(keys[0])])
        (into,) = buffers(1)
        (length,) = await store.get([PLACE.name(keys[0])], [into])
        _, traits, _ = decode(PLACE, keys[0], BLOCK_BYTES, into[:length])
        assert traits.label is not None and len(traits.label.event_hash) == 32
        assert bool(traits.label.tokens) is allowed


async def test_the_death_of_a_peer_in_a_transfer_is_no_object(far):
    big = replace(SPEC, groups=(WindowGroupSpec(pools=(PoolSpec(1, 1, 64 << 10),)),))
    place, nbytes = GroupPrefix("c", big.fingerprint(), GroupId(0)), big.block_bytes(0)
    async with opened_cache(far.address, "c", spec=big) as (_, cache), peer_of(far, big) as (_, store):
        keys = KEYS[: cache.slots(Tier.HOST) - 1]
        await cache.put(keys, [np.full(nbytes, number, np.uint8) for number in range(len(keys))], tier=Tier.HOST)
        names = [place.name(key) for key in keys]
        await known(store, names)
        into = buffers(len(names), object_bytes(nbytes))
        getting = asyncio.create_task(store.get(names, into))
        await eventually(lambda: any(buffer[0] for buffer in into) or getting.done(), bool)
        await asyncio.to_thread(far.kill)
        ended = asyncio.create_task(asyncio.wait_for(getting, 1))
        await asyncio.wait([ended])
        # Either it had all of them by then, or it says that it is away until its caller gives up.
        if ended.exception() is None:
            for key, buffer, length in zip(keys, into, ended.result(), strict=True):
                decode(place, key, nbytes, buffer[:length])
        else:
            assert isinstance(ended.exception(), TimeoutError | RemoteUnavailable)
        before = [bytes(buffer[:64]) for buffer in into]
        await asyncio.to_thread(far.start)
        assert [bytes(buffer[:64]) for buffer in into] == before


async def test_what_a_peer_will_or_can_not_give_is_told_apart(far, tmp_path):
    names = [PLACE.name(key) for key in KEYS]
    async with opened_cache(far.address, "c") as (_, cache), peer_of(far) as (_, store):
        await cache.put(KEYS, blocks(KEYS))
        await known(store, names)
        for refused in (store.put(names, []), store.delete(names)):
            with pytest.raises(RemoteRefused, match=far.tcp_address):
                await refused
        with pytest.raises(RemoteRefused):
            store.listing("")
        await change_rules(far, tmp_path / "rules.toml", RULE.format(verbs="'watch'"))
        with pytest.raises(RemoteRefused, match="right to read"):
            await store.get(names, buffers(len(names)))
        far.pause()
        try:
            getting = asyncio.create_task(store.get(names, buffers(len(names))))
            await asyncio.wait([getting], timeout=0.1)
            getting.cancel()
            await asyncio.wait([getting], timeout=PATIENCE_S)
            assert getting.done()
        finally:
            far.resume()
        await asyncio.to_thread(far.kill)
        await eventually(lambda: store._peer.status, lambda state: state != "exact")
        with pytest.raises(RemoteUnavailable):
            await store.exists(names)
        await asyncio.to_thread(far.start)


def test_names_are_parsed_as_they_are_made():
    name = PLACE.name(KEYS[0])
    assert parse(name) == (PLACE, KEYS[0])
    for wrong in (
        "",
        "c",
        name[:-1],
        name + "0",
        name.replace("/0/", "/x/"),
        name.replace("/0/", "/00/"),
        name.upper(),
    ):
        assert parse(wrong) is None
