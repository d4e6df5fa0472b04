"""Blocks whose pieces lie in several tensors: gathered into slots and scattered out of them, whichever way."""

import asyncio
from typing import Any

import numpy as np
import pytest
import torch

from kvtier import BlockResult, Client, InvalidArgument, Planes, Tier
from tests.integration.blocks import BLOCK_BYTES, SPEC, assert_bytes, block, blocks, chain, opened_cache, sizes
from tests.integration.models import VSWA, assert_content, by_hand, groups_of
from tests.integration.models import content as content_of
from tests.integration.waiting import PATIENCE_S, patient

PAGES = 12
SIZES = (1000, 1400, BLOCK_BYTES - 2400)
"""Of the pieces; the border of the two pools lies within one."""
KEYS = chain("planes", 4)
AT = [7, 0, 11, 3]
"""Their pages."""
OK = [BlockResult.OK] * 4
BUDGETS = sizes(device=8, host=8, disk=8)


def arrays(sizes=SIZES):
    """Of several dtypes and strides, numpy's and torch's: the first is every second page of one, the last a half of
    another."""
    first, second, third = sizes
    return [
        np.zeros((2 * PAGES, first // 4, 4), np.uint8)[::2],
        torch.zeros((PAGES, second // 2), dtype=torch.bfloat16),
        torch.zeros((PAGES, 2, third // 4, 4), dtype=torch.uint8)[:, 1],
    ]


def fill(planes, keys, at):
    for page, key in zip(at, keys, strict=True):
        for plane in planes.planes:
            piece = block(key)[plane.offset : plane.end]
            if isinstance(plane.array, np.ndarray):
                plane.array[page] = piece.view(plane.array.dtype).reshape(plane.array.shape[1:])
            else:
                plane.array[page] = torch.tensor(piece).view(plane.array.dtype).reshape(plane.array.shape[1:])


def content(planes, page):
    """The bytes of a page; 0 where no plane has any."""
    row = np.zeros(planes.block_bytes, np.uint8)
    for plane in planes.planes:
        piece = torch.as_tensor(plane.array)[page].contiguous().reshape(-1).view(torch.uint8)
        row[plane.offset : plane.end] = piece.numpy()
    return row


def assert_pages(planes, keys, at):
    """These pages have the blocks, and no other page has a byte."""
    assert_bytes(keys, [content(planes, page) for page in at])
    assert not any(content(planes, page).any() for page in set(range(PAGES)) - set(at))


@pytest.fixture(params=[True, False], ids=["mapped", "unmapped"])
async def cache(client, name, request):
    return await client.open_cache(name, SPEC, budgets=BUDGETS, mapped=request.param)


async def test_blocks_are_gathered_and_scattered(cache):
    source, target = Planes(arrays()), Planes(arrays())
    fill(source, KEYS, AT)
    assert await cache.put(KEYS, source[AT]) == OK
    assert_bytes(KEYS, await cache.get(KEYS))
    found = await cache.get([*KEYS, bytes(32)], target[[5, 2, 9, 10, 1]])
    assert found == [5, 2, 9, 10], "the pages that were filled"
    assert_pages(target, KEYS, [5, 2, 9, 10])


async def test_what_is_only_on_disk_is_scattered_too(client, name):
    cache, target = await client.open_cache(name, SPEC, budgets=BUDGETS), Planes(arrays())
    await cache.put(KEYS, blocks(KEYS), tier=Tier.HOST)
    await cache.move(KEYS[:1], Tier.DEVICE)
    await cache.move(KEYS[2:], Tier.DISK)
    assert await cache.get(KEYS, target[AT]) == AT
    assert_pages(target, KEYS, AT)
    assert cache.reads.calls == 1, "the first two were mapped"
    assert await cache.get(KEYS, Planes(arrays())[AT], verify=True) == AT


async def test_each_rank_has_its_own_part_of_a_slot(client, name):
    cache = await client.open_cache(name, SPEC, budgets=BUDGETS)
    first, second, third = arrays()
    ranks = [Planes([first], BLOCK_BYTES), Planes([(SIZES[0], second), third])]
    with pytest.raises(InvalidArgument, match="planes of 1000 bytes of a block's 6912"):
        await cache.put(KEYS, ranks[0][AT])
    async with cache.reserve(4, Tier.HOST) as lease:
        for planes in ranks:
            fill(planes, KEYS, AT)
            lease.arena.write(Tier.HOST, 0, lease.slots, planes[AT])
        assert await lease.commit(KEYS) == OK
    assert_bytes(KEYS, await cache.get(KEYS))
    for reader in (cache, await client.open_cache(name, mapped=False)):
        other = Planes([arrays()[0]], BLOCK_BYTES)
        assert await reader.get(KEYS, other[AT]) == AT
        assert all((content(other, page) == content(ranks[0], page)).all() for page in range(PAGES))


@pytest.mark.parametrize("verify", [False, True], ids=["plain", "verified"])
def test_the_synchronous_client_takes_planes(daemon, name, verify):
    source, target = Planes(arrays()), Planes(arrays())
    fill(source, KEYS, AT)
    with Client(daemon.address) as client:
        cache = client.open_cache(name, SPEC, budgets=BUDGETS)
        streamed = client.open_cache(name, mapped=False)
        assert cache.put(KEYS[:2], source[AT[:2]]) == OK[:2]
        assert streamed.put(KEYS[2:], source[AT[2:]], parent=KEYS[1]) == OK[2:]
        assert cache.get(KEYS, target[AT], verify=verify) == AT
        assert_pages(target, KEYS, AT)
        target = Planes(arrays())
        assert streamed.get(KEYS, target[AT]) == AT
        assert_pages(target, KEYS, AT)


@pytest.mark.parametrize("mapped", [True, False], ids=["mapped", "unmapped"])
async def test_all_window_groups_at_once(start_for, mapped):
    daemon = start_for(VSWA, host=32)
    keys, at = chain("across", 12), list(range(12))[::-1]
    async with await patient(daemon.address) as client:
        cache = await client.open_cache("c", VSWA, budgets=by_hand(VSWA, host=32), mapped=mapped)
        await cache.across.put(keys, {group: content_of(VSWA, group, keys) for group in groups_of(VSWA)})
        targets = {
            group: np.zeros((2, 12, VSWA.block_bytes(group) // 2), np.uint8) for group in groups_of(VSWA) if group != 2
        }
        out = {group: Planes(list(target))[[*at, 0]] for group, target in targets.items()}
        with await asyncio.to_thread(Client, daemon.address) as calls:
            same = await asyncio.to_thread(calls.open_cache, "c", mapped=mapped)
            asked: tuple[Any, ...] = [*keys, bytes(32)], out
            for reader, getting in (
                (cache, cache.across.get(*asked)),
                (same, asyncio.to_thread(same.across.get, *asked)),
            ):
                found = await getting
                assert reader.reads.calls == (0 if mapped else 1)
                assert (found[0], found[1]) == ([None] * 8 + at[8:], at)
                for group, target in targets.items():
                    filled = [page for page in found[group] if page is not None]
                    came = list(np.concatenate(list(target), axis=1)[filled])
                    assert_content(VSWA, group, keys[-len(filled) :], came)
                    assert group or not target[:, at[:8]].any(), "what is before the window stays"
                    target[:] = 0
                assert_content(VSWA, 2, keys[5:], found[2][5:])
        with pytest.raises(InvalidArgument, match="out = 3: must be groups 0 to 2"):
            await cache.across.get(keys, {3: out[0]})


@pytest.mark.parametrize(
    ("parts", "block_bytes", "message"),
    [
        (
            [np.zeros((2, PAGES, 8)), np.zeros((2, 8, PAGES)).transpose(0, 2, 1)],
            None,
            r"parts\[1\] = .*contiguous.*slice",
        ),
        ([torch.zeros(8, PAGES).T], None, r"parts\[0\] = .*contiguous.*slice"),
        ([np.zeros((PAGES, 8)), np.zeros((PAGES - 1, 8))], None, r"parts\[1\] = 11 pages: must be 12"),
        ([(0, np.zeros((PAGES, 8))), (60, np.zeros((PAGES, 8)))], None, r"parts\[1\] = bytes 60 to 124: .*no other"),
        ([np.zeros((PAGES, 8)), np.zeros((PAGES, 8))], 100, r"parts\[1\] = bytes 64 to 128: .* 100 bytes"),
        ([np.zeros((PAGES, 0))], None, r"parts\[0\] = an array without bytes"),
        ([np.zeros((PAGES, 8))[::-1]], None, r"parts\[0\] = pages of 64 bytes, -64 bytes apart"),
        ([np.broadcast_to(np.zeros(8), (PAGES, 8))], None, r"parts\[0\] = pages of 64 bytes, 0 bytes apart"),
        ([], None, "parts = no arrays"),
    ],
)
def test_what_is_no_plane_is_refused(parts, block_bytes, message):
    with pytest.raises(InvalidArgument, match=message):
        Planes(parts, block_bytes)


async def test_what_does_not_fit_changes_nothing(cache):
    planes = Planes(arrays())
    for numbers, message in (([12], r"pages\[0\] = 12: must be 0 to 11"), ([1, -1], r"pages\[1\] = -1")):
        with pytest.raises(InvalidArgument, match=message):
            planes[numbers]
    frozen = np.zeros((PAGES, BLOCK_BYTES), np.uint8)
    frozen.flags.writeable = False
    small = Planes([np.zeros((PAGES, 8), np.uint8)])
    assert await cache.put(KEYS, blocks(KEYS)) == OK
    wrong = [(planes[AT[:3]], "3 pages: must be 4"), (small[AT], "8 bytes a block: must be 6912")]
    for verb, more in ((cache.put, []), (cache.get, [(Planes([frozen])[AT], "number 0 is read-only")])):
        for pages, message in [*wrong, *more]:
            with pytest.raises(InvalidArgument, match=message):
                await verb(KEYS, pages)
    assert not any(content(planes, page).any() for page in range(PAGES))


async def test_an_arena_refuses_planes_of_other_blocks(daemon, name):
    async with (
        opened_cache(daemon.address, name, wait=PATIENCE_S, budgets=BUDGETS) as (_, cache),
        cache.reserve(2, Tier.HOST) as lease,
    ):
        with pytest.raises(InvalidArgument, match="8 bytes a block: must be 6912"):
            lease.arena.write(Tier.HOST, 0, lease.slots, Planes([np.zeros((2, 8), np.uint8)])[[0, 1]])
        with pytest.raises(InvalidArgument, match="1 pages: must be 2"):
            lease.arena.write(Tier.HOST, 0, lease.slots, Planes(arrays())[[0]])
