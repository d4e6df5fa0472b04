"""A prompt shorter than a block has no keys. It matches and stores nothing, and is no mistake: the client answers."""

from typing import Any

import pytest

from kvtier import InvalidArgument, Mirror, Scope, Tier, TooShort, chain_keys
from kvtier.wire import Keys
from tests.integration.models import VSWA, groups_of
from tests.integration.seeing import tier_stats
from tests.integration.waiting import patient

NONE = chain_keys(range(15), 16, Scope())
EITHER: tuple[Keys, ...] = (NONE, [])
NOTHING: dict[int, list[Any]] = {group: [] for group in groups_of(VSWA)}


@pytest.fixture
def daemon(start_for):
    return start_for(VSWA, device=8, host=8, disk=8)


@pytest.fixture(params=[True, False], ids=["mapped", "streamed"])
def opening(request):
    """A cache with two sliding groups, and a full one between them."""
    return {"spec": VSWA, "mapped": request.param}


async def test_every_verb_of_chains_takes_it(daemon, opening):
    async with await patient(daemon.address) as client, Mirror(client, ["short"]) as mirror:
        cache = await client.open_cache("short", **opening)
        await mirror.synced()
        assert mirror.longest_prefix(NONE, "short") == 0
        places: list[tuple[Any, Any]] = [(cache.in_group(group), []) for group in groups_of(VSWA)]
        for at, nothing in [(cache.across, NOTHING), *places]:
            for keys in EITHER:
                assert (await at.match(keys)).blocks == await at.prefix_length(keys) == 0
                assert await at.get(keys) == await at.get(keys, nothing, verify=True) == nothing
                assert await at.put(keys, nothing) == await at.put(keys, nothing, retention=None) == nothing
                async with at.acquire(keys) as lease:
                    for part in lease.groups:
                        assert (part.blocks, part.prefix_length, part.matched, part.keys) == (0, 0, 0, ())
                for least in (1, 100):
                    with pytest.raises(TooShort):
                        await at.acquire(keys, min_blocks=least)
                for least in (-1, 20_000, 2**40):
                    with pytest.raises(InvalidArgument, match=f"min_blocks = {least}: must be 0 to "):
                        await at.acquire(keys, min_blocks=least)
                async with at.acquire_many([keys, keys], Tier.HOST) as leases:
                    assert [each.blocks for each in leases] == [0, 0]
        assert (await tier_stats(client, "short", Tier.DEVICE)).held == 0


async def test_every_other_verb_of_a_group_takes_it(daemon, opening):
    async with await patient(daemon.address) as client:
        cache = await client.open_cache("short", **opening)
        for at in map(cache.in_group, groups_of(VSWA)):
            for keys in EITHER:
                assert ((await at.match(keys)).residency, list(await at.locate(keys))) == (b"", [])
                assert await at.move(keys, Tier.HOST) == await at.move(keys, Tier.DISK, dry_run=True) == []
                assert (await at.drop(keys)).results == (await at.drop(keys, dry_run=True)).results == []
                assert await at.set_retention(keys, 50, 3.0) == await at.set_retention(keys, []) == []
                assert await at.pin(keys, Tier.HOST) == await at.unpin(keys, Tier.HOST) == []


async def test_a_commit_of_none_ends_its_lease(daemon):
    async with await patient(daemon.address) as client:
        cache = await client.open_cache("short", VSWA)
        lease = await cache.reserve(2)
        assert await lease.commit(NONE, prompt=cache.prompt(range(15))) == []
        assert await lease.commit(NONE, release=True) == []
        assert (await tier_stats(client, "short", Tier.DEVICE)).held == 0
