"""Event hashes and tokens: from a commit to watchers that may see them; and what is refused."""

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from kvtier.v1 import admin_pb2, blocks_pb2, caches_pb2, common_pb2, events_pb2
from kvtierd.rights import AllowRule, Right, User
from kvtierd.service import attach, peer
from tests.integration import raw
from tests.unit.service.rig import HOST, SLOT_BYTES, SPEC, Client, attached, chain, config, running

TOKENS = SPEC.tokens_per_block
KEYS = chain(3)
HASHES = b"".join(hashlib.sha256(key).digest() for key in KEYS)
NAMED = caches_pb2.CacheOptions(event_hash="v1_block_key")
TOLD = caches_pb2.CacheOptions(event_hash="v2_sha256", keep_tokens=True)

IDS = [np.arange(start, start + TOKENS, dtype="<u4").tobytes() for start in (0, 100, 200)]
EXTRA = [bytes(8 * TOKENS), np.arange(TOKENS, dtype="<u8").tobytes(), bytes(8 * TOKENS)]
DIGESTS = [bytes([n]) * 32 for n in (7, 8)]
FIELDS = {
    "tokens": b"".join(IDS),
    "token_extra_ids": b"".join(EXTRA),
    "lora_id": 0,
    "cache_salt": "tenant",
    "mm_digests": b"".join(DIGESTS),
    "mm_blocks": [1, 1],
    "mm_offsets": [0, 5],
}
BLOCKS = [
    events_pb2.BlockTokens(token_ids=IDS[0], lora_id=0, cache_salt="tenant"),
    events_pb2.BlockTokens(
        token_ids=IDS[1],
        extra_ids=EXTRA[1],
        lora_id=0,
        cache_salt="tenant",
        mm_digests=b"".join(DIGESTS),
        mm_offsets=[0, 5],
    ),
    events_pb2.BlockTokens(token_ids=IDS[2], lora_id=0, cache_salt="tenant"),
]


async def commit_request(client: Client, cache: int, **fields: Any) -> blocks_pb2.CommitRequest:
    return raw.commit_request(cache, await client.reserve(cache, len(KEYS), HOST), KEYS, **fields)


async def store(client: Client, cache: int, **fields: Any) -> None:
    request = await commit_request(client, cache, **fields)
    done: blocks_pb2.CommitResponse = await client.call(client.blocks.Commit, request)
    assert set(done.results) == {common_pb2.BLOCK_RESULT_OK}
    await client.release(cache, request.lease_id)


async def events(client: Client, kind: int) -> list[events_pb2.Event]:
    """All events of a type so far."""
    stats = await client.call(client.admin.Stats, admin_pb2.StatsRequest())
    request = events_pb2.WatchRequest(oldest=True)
    found: list[events_pb2.Event] = []
    async for batch in client.events.Watch(request, metadata=client.metadata, timeout=10):
        found += [event for event in batch.events if event.type == kind]
        if batch.last_id >= stats.last_event_id:
            return found
    raise AssertionError("the watch ended")


async def slices(client: Client) -> list[events_pb2.SnapshotSlice]:
    request = events_pb2.WatchRequest(snapshot=True)
    found: list[events_pb2.SnapshotSlice] = []
    async for batch in client.events.Watch(request, metadata=client.metadata, timeout=10):
        if batch.HasField("slice"):
            found.append(batch.slice)
        if batch.snapshot_end:
            return found
    raise AssertionError("the watch ended")


async def test_a_cache_without_the_options_tells_nothing_more_than_before(client: Client) -> None:
    await store(client, await client.open())
    (stored,) = await events(client, events_pb2.EVENT_TYPE_STORED)
    fields = {field.name for field, _ in stored.ListFields()}
    assert fields.isdisjoint({"event_hash", "event_hashes", "parent_hashes", "tokens", "window_tokens"})


async def test_a_block_committed_without_a_hash_has_zeros_for_one(client: Client) -> None:
    await store(client, await client.open(options=NAMED))
    (stored,) = await events(client, events_pb2.EVENT_TYPE_STORED)
    assert stored.event_hashes == stored.parent_hashes == bytes(3 * 8)


async def test_tokens_and_all_of_their_scope_are_told(client: Client) -> None:
    await store(client, await client.open(options=TOLD), event_hashes=HASHES, **FIELDS)
    (stored,) = await events(client, events_pb2.EVENT_TYPE_STORED)
    (part,) = await slices(client)
    assert list(stored.tokens) == list(part.tokens) == BLOCKS


@pytest.mark.parametrize(("verbs", "told_of_mine"), [((), 0), ((Right.TOKENS,), len(KEYS))])
async def test_tokens_are_sent_to_those_alone_who_may_see_them_in_that_cache(
    monkeypatch: pytest.MonkeyPatch, short_dir: Path, verbs: tuple[Right, ...], told_of_mine: int
) -> None:
    user = User(4711, frozenset())
    monkeypatch.setattr(attach, "identify", lambda sock: replace(peer.identify(sock), identity=user))
    every = AllowRule(uids=(user.uid,), caches=("*",), verbs=(Right.READ, Right.WRITE, Right.WATCH, Right.ADMIN))
    more = [AllowRule(uids=(user.uid,), caches=("mine",), verbs=verbs)] if verbs else []
    async with running(config(short_dir, allow=(every, *more))) as daemon, attached(daemon) as client:
        for name in ("mine", "other"):
            cache = await client.open(name, {HOST: 4 * SLOT_BYTES}, TOLD)
            await store(client, cache, event_hashes=HASHES, **FIELDS)
        told: list[events_pb2.Event | events_pb2.SnapshotSlice] = [
            *await events(client, events_pb2.EVENT_TYPE_STORED),
            *await slices(client),
        ]
    assert [item.event_hashes for item in told] == [HASHES] * 4
    assert {(item.cache, len(item.tokens)) for item in told} == {("mine", told_of_mine), ("other", 0)}


@pytest.mark.parametrize(
    ("options", "fields", "field"),
    [
        (caches_pb2.CacheOptions(), {"event_hashes": bytes(24)}, "event_hashes"),
        (NAMED, {"event_hashes": bytes(23)}, "event_hashes"),
        (NAMED, {"event_hashes": bytes(3 * 32)}, "event_hashes"),
        (NAMED, {"tokens": b"".join(IDS)}, "tokens"),
        (TOLD, {"tokens": b"".join(IDS)[4:]}, "tokens"),
        (TOLD, {"lora_id": 5}, "lora_id"),
        (TOLD, {"cache_salt": ""}, "cache_salt"),
        (TOLD, {"mm_digests": DIGESTS[0]}, "mm_digests"),
        (TOLD, FIELDS | {"token_extra_ids": EXTRA[0]}, "token_extra_ids"),
        (TOLD, FIELDS | {"cache_salt": "x" * 1025}, "cache_salt"),
        (TOLD, FIELDS | {"mm_digests": DIGESTS[0]}, "mm_digests"),
        (TOLD, FIELDS | {"mm_digests": b""}, "mm_digests"),
        (TOLD, FIELDS | {"mm_offsets": [1]}, "mm_offsets"),
        (TOLD, FIELDS | {"mm_blocks": [1, 0]}, "mm_blocks[1]"),
        (TOLD, FIELDS | {"mm_blocks": [1, 3]}, "mm_blocks[1]"),
        (TOLD, FIELDS | {"partial_tokens": 3}, "tokens"),
        (TOLD, FIELDS | {"partial_tokens": TOKENS}, "partial_tokens"),
        (TOLD, {"partial_tokens": 3}, "partial_tokens"),
        (TOLD, FIELDS | {"tokens": b"".join(IDS)[: -4 * TOKENS + 12], "partial_tokens": 3}, "token_extra_ids"),
    ],
)
async def test_what_does_not_fit_refuses_the_whole_commit(
    client: Client, options: caches_pb2.CacheOptions, fields: dict[str, Any], field: str
) -> None:
    request = await commit_request(client, await client.open(options=options), **fields)
    code, detail = await client.refusal(client.blocks.Commit, request)
    assert (code, detail.field) == (grpc.StatusCode.INVALID_ARGUMENT, field)
    assert await events(client, events_pb2.EVENT_TYPE_STORED) == []


FIRST = IDS[0][:-4]


@pytest.mark.parametrize(
    ("options", "fields", "field"),
    [
        (NAMED, {"tokens": FIRST}, "tokens"),
        (TOLD, {"tokens": IDS[0]}, "tokens"),
        (TOLD, {"tokens": FIRST[1:]}, "tokens"),
        (TOLD, {"tokens": FIRST, "cache_salt": "x" * 1025}, "cache_salt"),
        (TOLD, {"lora_id": 0}, "lora_id"),
        (TOLD, {"cache_salt": ""}, "cache_salt"),
    ],
)
async def test_tokens_that_no_block_could_begin_with_refuse_a_match(
    client: Client, options: caches_pb2.CacheOptions, fields: dict[str, Any], field: str
) -> None:
    request = blocks_pb2.MatchRequest(cache_id=await client.open(options=options), **fields)
    code, detail = await client.refusal(client.blocks.Match, request)
    assert (code, detail.field) == (grpc.StatusCode.INVALID_ARGUMENT, field)


async def test_a_match_in_part_follows_a_chain_that_matches_whole(client: Client) -> None:
    cache = await client.open(options=TOLD)
    await store(client, cache, tokens=b"".join(IDS))

    async def match(*keys: bytes, tokens: bytes) -> tuple[int, bytes, int, int]:
        request = blocks_pb2.MatchRequest(cache_id=cache, keys=b"".join(keys), tokens=tokens)
        told: blocks_pb2.MatchResponse = await client.call(client.blocks.Match, request)
        return told.blocks, told.partial_key, told.partial_tokens, told.partial_residency

    host = 1 << common_pb2.TIER_HOST - 1
    assert await match(KEYS[0], tokens=IDS[1][:12]) == (1, KEYS[1], 3, host)
    assert await match(KEYS[0], tokens=IDS[1][:12] + IDS[2][:8]) == (1, KEYS[1], 3, host)
    assert await match(tokens=IDS[0][:4]) == (0, KEYS[0], 1, host)
    assert await match(KEYS[0], tokens=IDS[2][:12]) == (1, b"", 0, 0)
    for tokens in (IDS[0][:12], IDS[1][:12]):
        assert await match(KEYS[0], b"x" * 32, tokens=tokens) == (1, b"", 0, 0), "they follow a block that is not there"
