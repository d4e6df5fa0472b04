"""Reuse by the token: blocks that match in part, and last blocks that are not full."""

import asyncio
from collections.abc import Sequence

import pytest

from kvtier import BlockResult, CacheOptions, Mirror, MultimodalItem, Scope, Tier, TokenMatch
from kvtier.wire import split_keys
from tests.integration.blocks import SPEC, assert_bytes, blocks, opened_cache, sizes
from tests.integration.waiting import PATIENCE_S, eventually, patient

WIDTH = SPEC.tokens_per_block
KEPT = CacheOptions(keep_tokens=True)
IDS = list(range(1000, 1000 + 3 * WIDTH))


def opening(mapped: bool = True):
    return {"spec": SPEC, "budgets": sizes(host=16, disk=16), "options": KEPT, "mapped": mapped}


@pytest.fixture(params=[True, False], ids=["mapped", "streamed"])
async def cache(client, name, request):
    return await client.open_cache(name, **opening(request.param))


def prompt_of(cache, ids: Sequence[int], *scope: object):
    return cache.prompt(ids, *scope, partial=True)


async def put(cache, ids: Sequence[int], *scope: object):
    """Stores all blocks of a prompt, a partial one among them, and returns it."""
    prompt = prompt_of(cache, ids, *scope)
    results = await cache.put(prompt.keys, blocks(split_keys(prompt.keys)), prompt=prompt)
    assert set(results) <= {BlockResult.OK, BlockResult.EXISTS}
    return prompt


async def test_the_longest_run_of_tokens_is_found_and_copied_while_the_block_stays(cache):
    await put(cache, IDS[: 2 * WIDTH] + [7] * WIDTH)
    stored = await put(cache, IDS)
    await put(cache, [*IDS[: 2 * WIDTH + 3], *[8] * (WIDTH - 3)])
    asked = IDS[: 2 * WIDTH + 5] + [9] * WIDTH
    found = await cache.match_tokens(cache.prompt(asked))
    assert found == TokenMatch(2 * WIDTH + 5, stored.keys[:64], 5, stored.keys[64:])
    # The engine copies the block's bytes into a page of its own, computes the other tokens, and stores a block apart.
    assert_bytes(split_keys(stored.keys), await cache.get(found.keys + found.partial_key))
    async with cache.acquire_many([found.keys, found.partial_key]) as leases:
        assert [lease.blocks for lease in leases] == [2, 1]
    mine = await put(cache, asked)
    assert_bytes(split_keys(stored.keys), await cache.get(stored.keys))
    assert_bytes(split_keys(mine.keys), await cache.get(mine.keys))


async def test_the_first_block_of_a_prompt_matches_in_part(cache):
    stored = await put(cache, IDS[:WIDTH])
    found = await cache.match_tokens(cache.prompt([*IDS[:4], 1]))
    assert found == TokenMatch(4, b"", 4, stored.keys)
    assert (await cache.match_tokens(cache.prompt(IDS[:1]))).tokens == 1
    await cache.drop(stored.keys)
    assert (await cache.match_tokens(cache.prompt(IDS[:1]))).tokens == 0
    for nothing in ([], [1, 2, 3], list(range(100))):
        assert await cache.match_tokens(cache.prompt(nothing)) == TokenMatch(0, b"")


ITEM = MultimodalItem(b"i" * 32, WIDTH + 4, 6)


@pytest.mark.parametrize(
    ("stored", "asked", "tokens"),
    [
        ((Scope(salt="a"),), (Scope(salt="a"),), WIDTH + 9),
        ((Scope(salt="a"),), (Scope(salt="b"),), 0),
        ((Scope(salt="a"),), (), 0),
        ((), (Scope(salt=""),), 0),
        ((Scope(lora_id=1),), (Scope(lora_id=1),), WIDTH + 9),
        ((Scope(lora_id=0),), (), 0),
        ((), (Scope(multimodal=(ITEM,)),), WIDTH + 4),
        ((Scope(multimodal=(ITEM,)),), (), WIDTH),
        ((), (Scope(), [0] * (WIDTH + 2) + [1] * (WIDTH - 2)), WIDTH + 2),
        ((Scope(), [0] * (2 * WIDTH - 1) + [1]), (), WIDTH),
    ],
)
async def test_a_block_of_another_scope_does_not_match(cache, stored, asked, tokens):
    await put(cache, IDS[: 2 * WIDTH], *stored)
    changed = IDS[: WIDTH + 9] + [9] * (WIDTH - 9)
    assert (await cache.match_tokens(cache.prompt(changed, *asked))).tokens == tokens


async def test_keys_without_tokens_match_whole_blocks_alone(cache):
    prompt = cache.prompt(IDS[:WIDTH])
    await cache.put(prompt.keys, blocks([prompt.keys]))
    assert (await cache.match_tokens(cache.prompt(IDS[: WIDTH - 1]))).tokens == 0
    assert (await cache.match_tokens(cache.prompt(IDS))).tokens == WIDTH


async def test_a_cache_that_keeps_no_tokens_answers_in_whole_blocks(client, name):
    cache = await client.open_cache(name, SPEC, budgets=sizes(host=8))
    await put(cache, IDS[: 2 * WIDTH])
    found = await cache.match_tokens(cache.prompt(IDS[: 2 * WIDTH - 1]))
    assert found == TokenMatch(WIDTH, cache.prompt(IDS[:WIDTH]).keys)
    # Its partial blocks are found by their keys.
    swapped = await put(cache, IDS[: 2 * WIDTH + 7])
    assert (await cache.match_tokens(swapped)).tokens == 2 * WIDTH + 7


@pytest.mark.parametrize("end", ["stop", "kill"])
async def test_a_sequence_that_was_swapped_out_resumes_without_a_token_lost(start_daemon, end):
    daemon = start_daemon(host=64, disk=64)
    async with await patient(daemon.address) as client:
        cache = await client.open_cache("live", **opening())
        sequence = await put(cache, IDS[: 2 * WIDTH + 7])
        assert set(await cache.move(sequence.keys, Tier.DISK)) == {BlockResult.OK}
    await asyncio.to_thread(getattr(daemon, end))
    await asyncio.to_thread(daemon.start)
    async with await patient(daemon.address) as client:
        cache = await client.open_cache("live", **opening())
        found = await cache.match_tokens(prompt_of(cache, IDS[: 2 * WIDTH + 7]))
        assert found == TokenMatch(2 * WIDTH + 7, sequence.keys[:64], 7, sequence.keys[64:])
        assert await cache.probe(sequence.keys) == bytes([Tier.DISK.bit] * 3)
        # By its tokens it is found, too: a prompt that goes on in another way.
        assert (await cache.match_tokens(cache.prompt(IDS[: 2 * WIDTH + 4] + [9] * WIDTH))).partial_tokens == 4
        assert_bytes(split_keys(sequence.keys), await cache.get(sequence.keys))
        # It goes on, and is swapped out once more.
        grown = await put(cache, [*IDS, 5, 6])
        assert (await cache.match_tokens(grown)).tokens == 3 * WIDTH + 2


async def priorities(cache) -> dict[bytes, int]:
    return {row.key: row.priority async for row in cache.blocks()}


async def test_a_partial_block_that_has_grown_is_the_first_to_go(cache):
    shorter = await put(cache, IDS[: WIDTH + 3])
    other = await put(cache, [*IDS[: WIDTH + 2], 9])
    longer = await put(cache, IDS[: WIDTH + 7])
    *_, first = split_keys(shorter.keys)
    *_, beside = split_keys(other.keys)
    *_, second = split_keys(longer.keys)
    ranks = await priorities(cache)
    assert (ranks[first], ranks[beside], ranks[second]) == (0, 35, 35)
    whole = await put(cache, IDS[: 2 * WIDTH])
    ranks = await priorities(cache)
    assert (ranks[first], ranks[beside], ranks[second]) == (0, 35, 0)
    assert [ranks[key] for key in split_keys(whole.keys)] == [35, 35]
    assert_bytes(split_keys(shorter.keys), await cache.get(shorter.keys))


async def test_a_partial_block_of_another_scope_has_not_grown(cache):
    mine = await put(cache, IDS[:3], Scope(salt="mine"))
    await put(cache, IDS[:WIDTH])
    assert (await priorities(cache))[mine.keys] == 35


async def test_a_partial_block_has_no_children(cache):
    partial = await put(cache, IDS[: WIDTH + 3])
    child = blocks([b"c" * 32])
    assert await cache.put([b"c" * 32], child, parent=partial.keys[-32:]) == [BlockResult.PARENT_MISSING]
    assert await cache.put([b"c" * 32], child, parent=partial.keys[:32]) == [BlockResult.OK]


async def test_its_tokens_are_told_and_a_mirror_knows_it(client, cache):
    async with Mirror(client, [cache.name]) as mirror:
        prompt = await put(cache, IDS[: WIDTH + 3])
        cursor = (await cache.match(prompt.keys)).as_of
        await mirror.synced(cursor)
        assert mirror.longest_prefix(prompt.keys) == 2
    async with client.watch(caches=[cache.name], snapshot=True) as watch:
        async for item in watch:
            if getattr(item, "tokens", ()):
                assert [block.token_ids for block in item.tokens] == [tuple(IDS[:WIDTH]), tuple(IDS[WIDTH : WIDTH + 3])]
                return


async def test_while_no_daemon_answers_whole_blocks_count(start_daemon):
    daemon = start_daemon(host=64)
    async with opened_cache(daemon.address, "alone", wait=PATIENCE_S, options=KEPT) as (client, cache):
        await put(cache, IDS[: 2 * WIDTH])
        swapped = await put(cache, IDS[: WIDTH + 3])
        await asyncio.to_thread(daemon.kill)
        await eventually(lambda: client.connected, lambda connected: not connected)
        assert (await cache.match_tokens(cache.prompt(IDS[: 2 * WIDTH - 1]))).tokens == WIDTH
        assert (await cache.match_tokens(swapped)).tokens == WIDTH + 3
