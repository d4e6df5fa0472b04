"""Hints: what each action does to blocks, what bounds it, and what is rejected."""

import asyncio
from random import Random
from types import SimpleNamespace

import pytest

from kvtier import Hint, HintOutcome, HintResult, InvalidArgument, Retention, Tier
from kvtier.abi.words import ENDED_MS
from kvtier.retention import MAX_DURATION_MS
from kvtier.v1 import blocks_pb2, common_pb2
from tests.integration.blocks import SPEC, blocks, chain, put_chain
from tests.integration.conftest import own_cache
from tests.integration.waiting import eventually, patient

ACCEPTED, CLIPPED, DEFERRED, REJECTED, MISSING = HintOutcome
HOST, DISK = Tier.HOST, Tier.DISK
WHOLE_TIERS = 64

cache = own_cache(host=32, disk=WHOLE_TIERS)


class Later(Hint):
    """A hint of a later version."""

    def message(self):
        message = super().message()
        message.version = 2
        return message


async def turn(cache, tag, keys):
    """A turn of a conversation, which ends with the last of these keys."""
    await cache.put(keys, blocks(keys), retention=Retention(conversation=tag))


async def priorities(cache):
    return {block.key: block.priority async for block in cache.blocks()}


async def told(cache, *args, **fields):
    (result,) = await cache.hint(Hint(*args, **fields))
    return result


def forked(name, shared, length):
    """A chain that begins with the ``shared`` keys."""
    return [*shared, *chain(name, length)[len(shared) :]]


async def test_the_end_of_a_conversation_spares_what_another_one_has(cache):
    shared = chain("shared", 2)
    first, second = forked("first", shared, 4), forked("second", shared, 5)
    await turn(cache, "one", first)
    await turn(cache, b"two", second)
    ended = await told(cache, "end", "one")
    assert (ended.outcome, ended.blocks) == (CLIPPED, 2)
    assert "2 of 4 blocks" in ended.reason
    assert await priorities(cache) == dict.fromkeys(second, 35) | dict.fromkeys(first[2:], 0)
    assert (await told(cache, "end", "one")).outcome is MISSING, "it is forgotten"
    assert await told(cache, "end", "two") == HintResult(ACCEPTED, "", 5)
    assert set((await priorities(cache)).values()) == {0}


async def test_ended_blocks_that_a_request_finds_are_as_new_also_after_a_restart(start_for):
    daemon = start_for(SPEC, host=16, disk=32)
    async with await patient(daemon.address) as client:
        cache = await client.open_cache("kept", SPEC)
        ended, own = await put_chain(cache, "ended", 4), await put_chain(cache, "own", 2)
        await cache.move(ended + own, DISK)
        await told(cache, "end", keys=ended)
        await cache.set_retention(own, 0, [None, MAX_DURATION_MS / 1000])
        assert (await client.explain(ended[0], past=False)).blocks[0].duration_ms == ENDED_MS
        for found in 1, 3:
            for keys in ended[:found], own:
                async with cache.acquire(keys) as lease:
                    assert lease.blocks == len(keys)
            as_new = dict.fromkeys(ended[:found], 35) | dict.fromkeys(ended[found:] + own, 0)
            assert await priorities(cache) == as_new
            await asyncio.to_thread(daemon.stop)
            await asyncio.to_thread(daemon.start)
            await eventually(lambda: priorities(cache), lambda left: left == as_new)  # noqa: B023


async def test_ended_blocks_leave_before_older_ones(cache):
    old, ended = chain("old", 8), chain("ended", 8)
    await turn(cache, "old", old)
    await turn(cache, "ended", ended)
    await told(cache, "end", "ended")
    await put_chain(cache, "new", 24)  # the host is full, and blocks of priority 0 do not go down
    assert await cache.prefix_length(old) == 8
    assert await cache.prefix_length(ended) == 0


async def test_the_end_of_a_range_takes_the_conversation_back(cache):
    keys = chain("range", 6)
    await turn(cache, "c", keys)
    step = cache.spec.tokens_per_block
    middle = await told(cache, "end", "c", tokens=(step, 3 * step))
    assert (middle.outcome, middle.blocks) == (CLIPPED, 0), "later blocks stand on it"
    assert (await told(cache, "end", "c", tokens=(4 * step - 1, None))).blocks == 2
    assert list((await priorities(cache)).values()) == [35] * 4 + [0] * 2
    assert (await told(cache, "end", "c")).blocks == 4, "the conversation was taken back, not forgotten"


async def test_a_retention_goes_on_with_its_conversation(cache):
    keys = chain("turns", 6)
    await turn(cache, "c", keys[:2])
    assert (await told(cache, "retain", "c", priority=80, for_s=600)).outcome is ACCEPTED
    assert await priorities(cache) == dict.fromkeys(keys[:2], 80)
    await turn(cache, "c", keys)
    assert await priorities(cache) == dict.fromkeys(keys, 80)
    await told(cache, "end", "c", tokens=(4 * cache.spec.tokens_per_block, None))
    assert list((await priorities(cache)).values()) == [35] * 4 + [0] * 2, "the retention was of the last block"


async def test_an_expected_return_keeps_a_conversation_until_it_has_returned(cache):
    keys = chain("back", 4)
    await turn(cache, "soon", keys[:2])
    await told(cache, "return", "soon", for_s=2)
    soon = (await priorities(cache))[keys[0]]
    await put_chain(cache, "later", 2, retention=Retention(conversation="later"))
    await told(cache, "return", "later", for_s=40)
    late = (await priorities(cache))[chain("later", 1)[0]]
    assert soon > late > 35
    await turn(cache, "soon", keys)
    assert [(await priorities(cache))[key] for key in keys] == [35] * 4


async def test_a_client_keeps_no_more_than_its_share(cache):
    keys = await put_chain(cache, "long", 12, retention=Retention(conversation="c"))
    kept = await told(cache, "retain", "c", priority=90, for_s=600)
    assert (kept.outcome, kept.blocks, kept.reason) == (
        *(CLIPPED, WHOLE_TIERS // 8),
        "keys = 12 blocks: the client's hints may keep 8 more",
    )
    assert list((await priorities(cache)).values()) == [90] * 8 + [35] * 4
    assert await told(cache, "retain", "c", priority=90, for_s=600) == kept, "the same blocks count once"
    refused = await told(cache, "pin", keys=keys[:1], tier=HOST)
    assert refused.outcome is REJECTED
    assert (await told(cache, "retain", keys=keys, priority=10)).outcome is ACCEPTED, "it keeps nothing"


async def test_a_pin_ends_by_itself(cache, client):
    keys = await put_chain(cache, "pinned", 4)
    assert await cache.keep(keys, HOST, for_s=0.2) == (await told(cache, "pin", keys=keys, tier=HOST, for_s=600))
    pinned = (await client.explain(keys[0], past=False)).blocks[0].copies
    assert [copy.pins for copy in pinned if copy.tier is HOST] == [2]

    async def unpinned():
        return [copy.pins for copy in (await client.explain(keys[0], past=False)).blocks[0].copies if copy.tier is HOST]

    await eventually(unpinned, lambda pins: pins == [1])


async def test_demote_and_prefetch_move_blocks_in_the_background(cache):
    keys = await put_chain(cache, "moved", 4, retention=Retention(conversation="c"))
    assert (await told(cache, "demote", "c", tier=DISK)).outcome is DEFERRED
    await eventually(lambda: cache.probe(keys), lambda found: found == bytes([DISK.bit]) * 4)
    assert (await told(cache, "demote", "c", tier=DISK)).outcome is ACCEPTED, "done before"
    assert (await told(cache, "prefetch", "c", tier=HOST, for_s=30)).outcome is DEFERRED
    await eventually(lambda: cache.probe(keys), lambda found: all(each & HOST.bit for each in found))
    assert (await told(cache, "prefetch", "c", tier=DISK)).outcome is ACCEPTED, "a prefetch demotes nothing"
    assert all(each & HOST.bit for each in await cache.probe(keys))


async def test_a_put_whose_blocks_are_all_stored_tells_where_the_conversation_is(cache):
    keys = await put_chain(cache, "known", 3)
    await turn(cache, "c", keys)
    assert (await told(cache, "end", "c")).blocks == 3
    async with cache.acquire(keys[:2], retention=Retention(conversation="c")):
        assert (await told(cache, "end", "c")).blocks == 2, "an acquire tells it too"
    assert (await told(cache, "retain", "c", keys, priority=1)).blocks == 3, "and so does a hint with keys"


@pytest.mark.parametrize(
    ("hint", "reason"),
    [
        (Hint("explode", "c"), "action = explode: must be one of reached, retain, pin, prefetch, demote, end, return"),
        (Later("end", "c"), "version = 2: must be 0 to 1"),
        (Hint("end"), "keys = no keys: must be keys of 32 bytes, at least one"),
        (Hint("end", keys=chain("k", 1), tokens=(0, 5)), "end_token = 5: must be 0 without a conversation"),
        (Hint("pin", "c", tier=Tier.DEVICE), "tier = device: must be host or disk"),
        (Hint("prefetch", "c"), "tier = TIER_UNSPECIFIED: must be host or disk"),
    ],
    ids=["action", "version", "no-target", "range", "no-such-tier", "no-tier"],
)
async def test_a_hint_that_cannot_be_is_rejected_with_its_reason(cache, hint, reason):
    await turn(cache, "c", chain("k", 2))
    before = await priorities(cache)
    good, (bad, missing) = Hint("retain", "c", priority=35), await cache.hint(hint, Hint("end", "nobody"))
    assert bad.outcome is REJECTED
    assert bad.reason.startswith(reason)
    assert missing.outcome is MISSING
    assert await priorities(cache) == before
    assert [result.outcome for result in await cache.hint(good)] == [ACCEPTED], "the others go on"


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"conversation": 129 * "x"}, "conversation"),
        ({"conversation": "c", "tokens": (5, 5)}, r"tokens\[1\]"),
        ({"conversation": "c", "tokens": (-1, None)}, r"tokens\[0\]"),
        ({"conversation": "c", "for_s": -1.0}, "for_s"),
        ({"conversation": "c", "priority": 101}, "priority"),
    ],
)
async def test_a_malformed_hint_is_an_error_that_names_the_field(cache, fields, says):
    with pytest.raises(InvalidArgument, match=says):
        await told(cache, "retain", **fields)


async def test_a_time_beyond_the_longest_is_cut_and_a_flood_is_rejected(cache):
    await turn(cache, "c", chain("k", 2))
    long = await told(cache, "retain", "c", priority=50, for_s=7200)
    assert (long.outcome, long.reason) == (CLIPPED, "for_ms = 7200000: at most 3600000")
    flood = await asyncio.gather(*(cache.hint(*[Hint("end", "nobody")] * 256) for _ in range(24)))
    assert REJECTED in {result.outcome for results in flood for result in results}


async def test_whatever_a_hint_says_it_has_an_outcome(cache):
    """Hints of random fields, through the RPC. A rejected or missing one changes nothing."""
    draw = Random(7)
    keys = chain("fuzzed", 6)
    await turn(cache, "c", keys)

    def field():
        return draw.choice([0, 1, 17, 48, 2**31, 2**63])

    def hint():
        some = draw.choice([b"", keys[0], b"".join(keys), keys[0] * 2, b"\0" * 32, b"short"])
        return blocks_pb2.Hint(
            action=draw.choice(["reached", "retain", "pin", "prefetch", "demote", "end", "return", "", "Zs\0"]),
            version=draw.choice([0, 0, 1, 2]),
            keys=some,
            conversation=draw.choice([b"", b"c", b"c", b"x" * 129, b"nobody"]),
            first_token=field(),
            end_token=field(),
            tier=common_pb2.Tier.ValueType(draw.choice([0, 1, 2, 3, 7])),
            priority=draw.choice([0, 35, 100, 101]),
            for_ms=field(),
        )

    seen = set()
    for _ in range(400):
        message, before = hint(), await priorities(cache)
        (result,) = await cache.hint(SimpleNamespace(message=lambda message=message: message))
        seen.add(result.outcome)
        assert bool(result.reason) == (result.outcome is not ACCEPTED)
        if result.outcome in (REJECTED, MISSING):
            assert await priorities(cache) == before
    assert seen == set(HintOutcome)
    async with cache.acquire(keys) as lease:
        assert lease.blocks == 6
