"""Sequences of a model with several attention windows: matched, held, stored and read over all its window groups."""

import random

import pytest

from kvtier import BlockResult, CacheOptions, InvalidArgument, LeaseError, Tier, TierFull, TokenMatch, TooShort
from kvtier.abi.words import TIERS
from kvtier.wire import split_keys
from tests.integration.blocks import chain, opened_cache
from tests.integration.models import VSWA, assert_content, by_hand, content, groups_of
from tests.integration.seeing import tier_stats
from tests.integration.touching import bytes_in
from tests.integration.waiting import PATIENCE_S

KEYS = chain("across", 24)
"""Windows of 64 and 100 tokens are covered by 4 and 7 blocks of 16."""


def first_block(group, blocks):
    """The first block that a group needs of a prefix, counted token by token from the contract."""
    window = VSWA.groups[group].window_tokens
    if not window:
        return 0
    tokens = range(max(0, blocks * 16 - window), blocks * 16)
    return tokens[0] // 16 if tokens else blocks


def longest(held, keys, groups):
    """The oracle: tries every length from the longest down, and asks of each whether every block it needs is there."""
    return next(
        blocks
        for blocks in range(len(keys), -1, -1)
        if all(set(keys[first_block(group, blocks) : blocks]) <= held[group] for group in groups)
    )


async def held_by(cache):
    return {group: {row.key async for row in cache.in_group(group).blocks()} for group in groups_of(VSWA)}


async def put(cache, keys, groups=None):
    """Stores a chain: in each group so many of its last blocks; by default what a prefix of its length needs."""
    counts = groups or {group: len(keys) - first_block(group, len(keys)) for group in groups_of(VSWA)}
    arrays = {group: content(VSWA, group, keys[len(keys) - count :]) for group, count in counts.items()}
    results = await cache.across.put(keys, arrays)
    assert results == {group: [BlockResult.OK] * count for group, count in counts.items()}


@pytest.fixture
def daemon(start_for):
    return start_for(VSWA, device=32, host=32, disk=32)


@pytest.fixture
async def cache(client):
    return await client.open_cache("vswa", VSWA, budgets=by_hand(VSWA, device=32, host=32, disk=32))


IDS = [*range(12 * 16)]


@pytest.mark.parametrize("stored", [192, 181], ids=["of a full block", "of a partial block"])
async def test_a_prefix_may_end_inside_a_block(client, stored):
    options = CacheOptions(keep_tokens=True)
    cache = await client.open_cache("parts", VSWA, budgets=by_hand(VSWA, device=32, host=32), options=options)
    prompt = cache.prompt(IDS[:stored], partial=True)
    keys, packed = split_keys(prompt.keys), prompt.keys[: 11 * 32]
    last = {group: content(VSWA, group, keys[-count:]) for group, count in enumerate((5, 12, 8))}
    await cache.across.put(keys, last, prompt=prompt)
    asked = cache.prompt([*IDS[:181], 7, 7, 7])
    found = await cache.across.match_tokens(asked)
    assert found == TokenMatch(181, packed, 5, keys[11])
    assert found == await cache.across.match_tokens(cache.prompt(IDS[:181], partial=True))
    async with cache.across.acquire_many([found.keys, found.partial_key], Tier.DEVICE) as leases:
        for group in groups_of(VSWA):
            held = {key for lease in leases for key in lease.groups[group].keys}
            window = VSWA.groups[group].window_tokens or 181
            assert held >= {keys[token // 16] for token in range(181 - window, 181)}
    for group, got in (await cache.across.get(found.partial_key)).items():
        assert_content(VSWA, group, keys[11:], got)
    await cache.in_group(0).drop(keys[7:8])  # tokens 112 to 127; the window at token 181 begins at token 117
    assert (await cache.across.match(keys)).blocks == 12
    assert await cache.across.match_tokens(asked) == TokenMatch(0, b"")
    await cache.in_group(0).put(keys[7:8], content(VSWA, 0, keys[7:8]), parent=keys[6])
    await cache.in_group(2).drop(keys[11:])
    assert await cache.across.match_tokens(asked) == TokenMatch(176, packed)


async def test_what_is_acquired_is_held_in_every_group_and_released_at_once(client, cache):
    await put(cache, KEYS)
    async with cache.across.acquire([*KEYS, *chain("more", 1)], Tier.DEVICE, min_blocks=24) as lease:
        assert (lease.blocks, lease.matched, lease.keys) == (24, 24, tuple(KEYS))
        assert [len(part) for part in lease.groups] == [4, 24, 7]
        assert lease.unchanged()
        for group, part in enumerate(lease.groups):
            assert part.keys == tuple(KEYS[part.needed.first :])
            views = [bytes_in(part.view(index)) for index in range(part.blocks)]
            assert_content(VSWA, group, part.keys, views)
        assert (await tier_stats(client, cache.name, Tier.DEVICE)).held == 35
    assert (await tier_stats(client, cache.name, Tier.DEVICE)).held == 0
    with pytest.raises(LeaseError, match="is released"):
        await lease.release()
    with pytest.raises(TooShort):
        await cache.across.acquire(chain("absent", 3), min_blocks=1)


async def test_what_a_sequence_leaves_behind_its_window_is_given_back(client, cache):
    await put(cache, KEYS)
    async with cache.across.acquire(KEYS, Tier.DEVICE) as lease:
        window = lease.groups[2]
        await window.give_back([0, 1, 2])
        assert (window.blocks, (await tier_stats(client, cache.name, Tier.DEVICE)).held) == (4, 32)
        with pytest.raises(LeaseError, match="not held any more"):
            window.view(2)
        assert_content(VSWA, 2, window.keys[3:4], [bytes_in(window.view(3))])
        await window.give_back([3])
        with pytest.raises(LeaseError, match="not held any more"):
            await window.give_back([4, 3])
        with pytest.raises(InvalidArgument, match=r"at\[1\] = 7: must be 0 to 6"):
            await window.give_back([4, 7])
        assert window.blocks == 3
        # What is not held can be evicted; what is, cannot.
        crowd = chain("crowd", 96)
        await cache.in_group(2).put(crowd, content(VSWA, 2, crowd), tier=Tier.DEVICE)
        assert window.unchanged()
    assert (await tier_stats(client, cache.name, Tier.DEVICE)).held == 0


async def test_groups_are_counted_apart(client, cache):
    await put(cache, KEYS)
    async with cache.across.acquire([*KEYS, *chain("more", 1)], Tier.DEVICE):
        (stats,) = (await client.stats()).caches
        assert [(group.window_tokens, group.blocks, group.stored) for group in stats.groups] == [
            (64, 4, 4),
            (0, 24, 24),
            (100, 7, 7),
        ]
        assert [group.hits_device for group in stats.groups] == [4, 24, 7]
        for group in stats.groups:
            assert [tier.held for tier in group.tiers] == [group.blocks, 0, 0]
            assert [tier.capacity for tier in group.tiers] == [32, 32, 32]
        for tier in stats.tiers:
            parts = [each for group in stats.groups for each in group.tiers if each.tier is tier.tier]
            assert (tier.capacity, tier.ready) == (sum(p.capacity for p in parts), sum(p.ready for p in parts))


@pytest.mark.parametrize("seed", range(3))
async def test_matches_agree_with_an_oracle_under_random_traffic(start_for, seed):
    """Chains that share prefixes are stored with holes, moved, dropped, and evicted from tiers too small for them."""
    chooser = random.Random(seed)
    daemon = start_for(VSWA, device=12, host=10, disk=30)
    async with opened_cache(daemon.address, "vswa", spec=VSWA, wait=PATIENCE_S) as (client, cache):
        stems = [chain(f"stem {number}", 14) for number in range(3)]
        chains = [
            stem[:cut] + chain(f"twig {number}/{cut}", 14 - cut)
            for number, stem in enumerate(stems)
            for cut in (14, 9, 5)
        ]
        lengths = set()
        for _ in range(60):
            await disturb(cache, chooser, chooser.choice(chains))
            for keys in chains:
                held, found, alone = await seen(cache, keys)
                assert found.blocks == longest(held, keys, groups_of(VSWA))
                assert [span.first_block for span in found.groups] == [
                    first_block(group, found.blocks) for group in groups_of(VSWA)
                ]
                lengths.add(found.blocks)
                for group, match in alone.items():
                    assert match.blocks == longest(held, keys, [group])
                    needed = range(first_block(group, match.blocks), match.blocks)
                    assert [n for n, residency in enumerate(match.residency) if residency] == [*needed]
            for verbs in (cache.across, cache.in_group(chooser.choice(groups_of(VSWA)))):
                await check_prefix(verbs, chooser.choice(chains))
        assert len(lengths) > 5, f"the traffic hardly tests anything: lengths {sorted(lengths)}"
        assert (await client.stats()).caches[0].removed > 0


async def seen(cache, keys):
    """What is stored, and what matches of a chain find: anew where the daemon makes room meanwhile."""
    while True:
        held = await held_by(cache)
        found = await cache.across.match(keys)
        alone = {group: await cache.in_group(group).match(keys) for group in groups_of(VSWA)}
        if await held_by(cache) == held:
            return held, found, alone


async def disturb(cache, chooser, keys):
    """One thing that clients do, to one chain in one group."""
    group = cache.in_group(chooser.choice(groups_of(VSWA)))
    some = keys[: chooser.randint(1, len(keys))]
    if cache.spec.groups[group.group].window_tokens:
        some = some[chooser.randrange(len(some)) :]  # a sliding group takes any part of a chain
    match chooser.choice(["sequence", "sequence", "put", "put", "move", "drop"]):
        case "sequence":
            end = chooser.randint(1, 14)
            whole = {each: content(VSWA, each, keys[first_block(each, end) : end]) for each in groups_of(VSWA)}
            await cache.across.put(keys[:end], whole, tier=chooser.choice([Tier.DEVICE, Tier.HOST]))
        case "put":
            await group.put(some, content(VSWA, group.group, some), tier=chooser.choice([Tier.DEVICE, Tier.HOST]))
        case "move":
            await group.move(some, chooser.choice(list(TIERS)))
        case "drop":
            await group.drop(some[-1:])


async def check_prefix(verbs, keys):
    """What is held, and what is copied, is a prefix that the contract allows, and its bytes are right."""
    stored = (await verbs.match(keys)).blocks
    async with verbs.acquire(keys) as lease:
        for part in lease.groups:
            group, length = part.cache.group, lease.groups[0].prefix_length
            assert part.prefix_length == length <= part.matched == stored
            assert list(part.keys) == keys[first_block(group, length) : length]
            assert_content(VSWA, group, part.keys, [bytes_in(part.view(index)) for index in range(part.blocks)])
    found = await verbs.get(keys)
    by_group = found if len(verbs.groups) > 1 else {verbs.group: found}
    length = len(by_group[verbs.groups[0]])
    assert length == stored or (length < stored and len(verbs.groups) > 1), "in one piece, it is cut to the tier's room"
    for group, rows in by_group.items():
        first = first_block(group, length)
        assert (len(rows), rows[:first]) == (length, [None] * first)
        assert_content(VSWA, group, keys[first:length], rows[first:])


# -- stored in one group after another ---------------------------------------------------------------------------------


FULL = 1


def arrays(keys):
    """Of a put that names a sliding group first."""
    return {group: content(VSWA, group, keys) for group in reversed(groups_of(VSWA))}


@pytest.mark.parametrize("mapped", [True, False])
async def test_a_put_that_a_group_has_no_room_for_can_be_made_again(cache, client, mapped):
    """Full-attention groups come first; what they have stored by then no match over all groups counts."""
    writer = await client.open_cache(cache.name, mapped=mapped)
    crowded = cache.in_group(2)
    async with crowded.reserve(crowded.slots(Tier.DEVICE)):
        with pytest.raises(TierFull):
            await writer.across.put(KEYS[:4], arrays(KEYS[:4]))
    assert (await held_by(cache))[FULL] == set(KEYS[:4])
    assert (await cache.across.match(KEYS[:4])).blocks == 0
    results = await writer.across.put(KEYS[:4], arrays(KEYS[:4]))
    expected = [BlockResult.OK, BlockResult.EXISTS]
    assert results == {group: [expected[group == FULL]] * 4 for group in groups_of(VSWA)}
    assert (await cache.across.match(KEYS[:4])).blocks == 4


async def test_a_sliding_group_stores_each_block_that_is_missing(cache):
    """Its blocks stand for themselves: a later one may be there without those before."""
    sliding = cache.in_group(0)
    rows = content(VSWA, 0, KEYS[:6])
    assert await sliding.put(KEYS[3:4], rows[3:4], parent=KEYS[2]) == [BlockResult.OK]
    assert await sliding.put(KEYS[5:6], rows[5:6], parent=KEYS[4]) == [BlockResult.OK]
    wrong = [rows[0] if index in (3, 5) else row for index, row in enumerate(rows)]
    expected = [BlockResult.EXISTS if index in (3, 5) else BlockResult.OK for index in range(6)]
    assert await sliding.put(KEYS[:6], wrong) == expected
    assert_content(VSWA, 0, KEYS[2:6], (await sliding.get(KEYS[:6]))[2:])


async def test_a_group_that_refuses_blocks_says_so_and_the_prefix_ends_there(cache):
    results = await cache.across.put(KEYS[4:8], arrays(KEYS[4:8]), parent=KEYS[3])
    assert results[FULL] == [BlockResult.PARENT_MISSING] * 4
    assert (await cache.across.match(KEYS[:8])).blocks == 0


async def test_a_long_chain_goes_in_pieces_in_every_group(cache):
    keys = chain("long", 40)
    results = await cache.across.put(keys, {group: content(VSWA, group, keys) for group in groups_of(VSWA)})
    assert results == {group: [BlockResult.OK] * 40 for group in groups_of(VSWA)}
