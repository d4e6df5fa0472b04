"""``client.explain_request`` and ``kvtier explain`` of a prompt: how much is stored, where, and why it ends there."""

import json
import os

import pytest

from kvtier import CacheOptions, Cause, Scope, Tier, chain_keys
from kvtier.cli.explain import GONE, UNKNOWN
from kvtier.explanation import why_gone
from tests.integration.blocks import SPEC, blocks, chain, put_chain, sizes
from tests.integration.conftest import own_cache
from tests.integration.test_cli import kvtier

cache = own_cache(host=8, disk=16)
STEP = SPEC.tokens_per_block


async def test_a_prefix_lies_in_runs_of_tiers(client, cache):
    keys = await put_chain(cache, cache.name, 5)
    await cache.move(keys, Tier.DISK)
    await cache.move(keys[:2], Tier.HOST)
    told = await client.explain_request(cache.name, keys)
    assert [(run.tier, run.first_block, run.blocks) for run in told.runs] == [(Tier.HOST, 0, 2), (Tier.DISK, 2, 3)]
    assert told.runs[0].load_s == 0
    assert told.runs[1].load_s is not None
    assert 0 < told.runs[1].load_s < 10, "two blocks came from disk before"
    assert (told.asked, told.blocks, told.why, told.miss) == (5, 5, "", None)


async def test_the_first_miss_has_its_reason(client, cache, other, name):
    keys = chain(name, 6)
    await cache.put(keys[:4], blocks(keys[:4]))
    told = await client.explain_request(cache.name, keys)
    assert (told.blocks, told.parts_at) == (4, (4 * STEP, 5 * STEP))
    assert told.why.startswith("It was never stored")
    await cache.drop(keys[2])
    told = await client.explain_request(cache.name, keys)
    assert (told.blocks, told.parts_at) == (2, (2 * STEP, 3 * STEP))
    assert told.why.endswith(why_gone(Cause.EXPLICIT))
    twin = await other.open_cache(f"{name}-2", SPEC, budgets=sizes(host=8))
    await twin.put(keys, blocks(keys))
    assert (await client.explain_request(cache.name, keys[:1] + keys[2:])).why.endswith(why_gone(Cause.EXPLICIT))
    told = await client.explain_request(cache.name, chain(name, 1) + keys[4:])
    assert told.why == f"Cache {name}-2 has it: other weights, another spec, or another name."


async def test_evicted_blocks_have_their_cause(client, name):
    small = await client.open_cache(name, SPEC, budgets=sizes(host=4))
    keys = await put_chain(small, "first", 4)
    await put_chain(small, "second", 2)
    told = await client.explain_request(name, keys)
    assert told.blocks == 2
    assert why_gone(Cause.CAPACITY) in told.why
    assert told.why.endswith(
        f" Session {client.session_id}, pid {os.getpid()} {told.miss.departures[0].command} wanted it."
    )
    assert told.miss.past is None, "the daemon remembers, and the log is not read"


async def test_evictions_are_for_the_session_that_wanted_the_room(client, other, name):
    small = await client.open_cache(name, SPEC, budgets=sizes(host=4))
    theirs = await other.open_cache(name)
    keys = await put_chain(small, name, 4)
    lease = await theirs.reserve(3, Tier.HOST)
    told = await client.explain(keys[1], cache=name)
    assert [(end.cause, end.session_id) for end in told.endings()] == [(Cause.CAPACITY, other.session_id)]
    await lease.release()
    await small.put(keys, blocks(keys))
    assert [*(await client.explain(keys[1], cache=name)).endings()] == [], "it is there again"
    await small.drop(keys[:1])
    told = [await client.explain(key, cache=name, past=False) for key in keys[:2]]
    ends = [(end.cause, end.session_id, end.pid) for each in told for end in each.endings()]
    assert ends == [(Cause.EXPLICIT, 0, 0), (Cause.ANCESTOR, 0, 0)]
    assert [each.state for each in told] == ["gone", "gone"]


async def test_a_prompt_says_its_token_and_its_salt(client, name):
    kept = await client.open_cache(name, SPEC, budgets=sizes(host=16), options=CacheOptions(keep_tokens=True))
    tokens = [*range(4 * STEP)]
    prompt = kept.prompt(tokens)
    await kept.put(prompt.keys, blocks([prompt.keys[at : at + 32] for at in range(0, 128, 32)]), prompt=prompt)
    edited = kept.prompt([*tokens[: 2 * STEP + 5], 7, *tokens[2 * STEP + 6 :]])
    assert (await client.explain_request(name, edited)).parts_at == (2 * STEP + 5, 2 * STEP + 5)
    salted = kept.prompt(tokens, Scope(salt="tenant"))
    told = await client.explain_request(name, salted, variants={"without the salt": chain_keys(tokens, STEP)})
    assert (told.blocks, told.why) == (0, "The same tokens are stored without the salt: 4 blocks.")


async def test_the_command(daemon, cache, at, tmp_path, name):
    tokens = [*range(3 * STEP)]
    keys = chain_keys(tokens, STEP)
    await cache.put(keys, blocks([keys[place : place + 32] for place in range(0, 96, 32)]))
    (tmp_path / "tokens").write_text(json.dumps([*tokens, *range(STEP)]))
    (tmp_path / "keys").write_text("\n".join(key.hex() for key in chain(name, 2)))
    ask = "explain", "--cache", cache.name, *at
    said = kvtier(*ask, "--tokens", str(tmp_path / "tokens"), status=UNKNOWN).stdout
    assert f"{cache.name}: 3 of 4 blocks are stored" in said
    assert "host        blocks 0 to 2" in said
    assert f"parts at a token from {3 * STEP} to {4 * STEP - 1}" in said
    found = json.loads(kvtier(*ask, "--keys", str(tmp_path / "keys"), "-o", "json", status=UNKNOWN).stdout)
    assert (found["blocks"], found["asked"], found["miss"]["state"]) == (0, 2, "unknown")
    await cache.drop(keys[32:64])
    assert "by call" in kvtier(*ask, "--tokens", str(tmp_path / "tokens"), status=GONE).stdout


@pytest.mark.parametrize("given", [(), ("--tokens", "/dev/null", "--keys", "/dev/null"), ("--tokenizer", "x")])
def test_a_request_is_named_in_one_way(at, given):
    assert "name a KEY" in kvtier("explain", "--cache", "c", *at, *given, status=2).stderr
