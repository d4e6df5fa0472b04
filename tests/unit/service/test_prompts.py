"""Event hashes and tokens: from a commit to watchers that may see them, over a restart; and what is refused."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from kvtier.v1 import admin_pb2, blocks_pb2, caches_pb2, common_pb2, events_pb2
from kvtierd.config import Config
from kvtierd.rights import AllowRule, Right, User
from kvtierd.service import attach, peer, wire
from tests.unit.service.rig import DISK, HOST, SPEC, Client, attached, chain, config, parents_of, running

TOKENS = SPEC.tokens_per_block
KEYS = chain(3)
STRANGER = 4711
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


def hashes(size: int) -> list[bytes]:
    return [hashlib.sha256(key).digest()[:size] for key in KEYS]


async def opened(client: Client, options: caches_pb2.CacheOptions, name: str = "cache") -> int:
    request = caches_pb2.OpenRequest(name=name, spec=wire.spec(SPEC), options=options)
    reply: caches_pb2.OpenResponse = await client.call(client.caches.Open, request)
    return reply.cache_id


async def commit_request(client: Client, cache: int, **fields: Any) -> blocks_pb2.CommitRequest:
    granted = await client.reserve(cache, len(KEYS), HOST)
    return blocks_pb2.CommitRequest(
        cache_id=cache,
        lease_id=granted.lease_id,
        slots=granted.slots,
        keys=b"".join(KEYS),
        parents=parents_of(KEYS),
        **fields,
    )


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


async def everything(client: Client) -> list[events_pb2.Event | events_pb2.SnapshotSlice]:
    """That tells of stored blocks."""
    return [*await events(client, events_pb2.EVENT_TYPE_STORED), *await slices(client)]


async def test_hashes_stand_in_every_event_of_their_blocks(tmp_path: Path) -> None:
    async with running(config(tmp_path, disk=4)) as daemon, attached(daemon) as client:
        cache = await opened(client, NAMED)
        await store(client, cache, event_hashes=b"".join(hashes(8)))
        await client.call(client.blocks.Move, blocks_pb2.MoveRequest(cache_id=cache, to=DISK, keys=b"".join(KEYS)))
        (part,) = await slices(client)
        await client.call(client.blocks.Drop, blocks_pb2.DropRequest(cache_id=cache, keys=KEYS[0]))
        (created,) = await events(client, events_pb2.EVENT_TYPE_CREATED)
        (stored,) = await events(client, events_pb2.EVENT_TYPE_STORED)
        moved = await events(client, events_pb2.EVENT_TYPE_UPDATED)
        removed = await events(client, events_pb2.EVENT_TYPE_REMOVED)
    told: list[events_pb2.Event | events_pb2.SnapshotSlice] = [created, stored, *moved, *removed, part]
    assert {each.event_hash for each in told} == {"v1_block_key"}
    assert stored.event_hashes == part.event_hashes == b"".join(hashes(8))
    assert stored.parent_hashes == part.parent_hashes == bytes(8) + b"".join(hashes(8)[:2])
    assert b"".join(event.event_hashes for event in moved) == b"".join(hashes(8))
    assert b"".join(event.event_hashes for event in removed) == b"".join(reversed(hashes(8)))
    assert not stored.tokens


async def test_a_cache_without_the_options_tells_nothing_more_than_before(tmp_path: Path) -> None:
    async with running(config(tmp_path)) as daemon, attached(daemon) as client:
        await store(client, await client.open())
        (stored,) = await events(client, events_pb2.EVENT_TYPE_STORED)
    fields = {field.name for field, _ in stored.ListFields()}
    assert fields.isdisjoint({"event_hash", "event_hashes", "parent_hashes", "tokens", "window_tokens"})


async def test_a_block_committed_without_a_hash_has_zeros_for_one(tmp_path: Path) -> None:
    async with running(config(tmp_path)) as daemon, attached(daemon) as client:
        await store(client, await opened(client, NAMED))
        (stored,) = await events(client, events_pb2.EVENT_TYPE_STORED)
    assert stored.event_hashes == stored.parent_hashes == bytes(3 * 8)


async def test_tokens_and_all_of_their_scope_are_told(tmp_path: Path) -> None:
    async with running(config(tmp_path)) as daemon, attached(daemon) as client:
        await store(client, await opened(client, TOLD), event_hashes=b"".join(hashes(32)), **FIELDS)
        (stored,) = await events(client, events_pb2.EVENT_TYPE_STORED)
        (part,) = await slices(client)
    assert list(stored.tokens) == list(part.tokens) == BLOCKS


async def test_hashes_tokens_and_options_outlive_a_restart(tmp_path: Path) -> None:
    settings = config(tmp_path, disk=4)
    async with running(settings) as daemon, attached(daemon) as client:
        cache = await opened(client, TOLD)
        await store(client, cache, event_hashes=b"".join(hashes(32)), **FIELDS)
        await client.call(client.blocks.Move, blocks_pb2.MoveRequest(cache_id=cache, to=DISK, keys=b"".join(KEYS)))
    async with running(settings) as daemon, attached(daemon) as client:
        (part,) = await slices(client)
        await opened(client, TOLD)
    assert part.event_hash == "v2_sha256"
    assert part.event_hashes == b"".join(hashes(32))
    assert list(part.tokens) == BLOCKS


def stranger(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *verbs: Right) -> Config:
    """Whoever attaches is taken for a user with these rights on the cache "mine", and for one who may only watch the
    others."""
    user = User(STRANGER, frozenset())
    monkeypatch.setattr(attach, "identify", lambda sock: replace(peer.identify(sock), identity=user))
    every = (Right.READ, Right.WRITE, Right.WATCH, Right.ADMIN)
    rules = (
        AllowRule(uids=(STRANGER,), caches=("*",), verbs=every),
        *(AllowRule(uids=(STRANGER,), caches=("mine",), verbs=(verb,)) for verb in verbs),
    )
    return config(tmp_path, allow=rules)


async def fill_two(client: Client) -> None:
    for name in ("mine", "other"):
        request = caches_pb2.OpenRequest(
            name=name,
            spec=wire.spec(SPEC),
            options=TOLD,
            budgets=[caches_pb2.TierBudget(tier=HOST, bytes=4 * SPEC.record_bytes(0))],
        )
        reply = await client.call(client.caches.Open, request)
        await store(client, reply.cache_id, event_hashes=b"".join(hashes(32)), **FIELDS)


async def test_who_may_watch_but_not_see_tokens_is_sent_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async with running(stranger(monkeypatch, tmp_path)) as daemon, attached(daemon) as client:
        await fill_two(client)
        told = await everything(client)
    assert len(told) == 4
    assert all(item.event_hashes for item in told)
    assert not any(item.tokens for item in told)


async def test_tokens_of_one_cache_are_sent_to_who_may_see_those(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async with running(stranger(monkeypatch, tmp_path, Right.TOKENS)) as daemon, attached(daemon) as client:
        await fill_two(client)
        told = await everything(client)
    assert {(item.cache, len(item.tokens)) for item in told} == {("mine", 3), ("other", 0)}


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
    ],
)
async def test_what_does_not_fit_refuses_the_whole_commit(
    tmp_path: Path, options: caches_pb2.CacheOptions, fields: dict[str, Any], field: str
) -> None:
    async with running(config(tmp_path)) as daemon, attached(daemon) as client:
        request = await commit_request(client, await opened(client, options), **fields)
        code, detail = await client.refusal(client.blocks.Commit, request)
        assert (code, detail.field) == (grpc.StatusCode.INVALID_ARGUMENT, field)
        assert await events(client, events_pb2.EVENT_TYPE_STORED) == []
