"""Bad input over the bare wire: refused with the code, field, value and limit that say what is wrong, changing nothing.

A negative size is a huge one by the time it is on the wire: fields are unsigned.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import grpc
import pytest
import pytest_asyncio
from google.protobuf.message import Message

from kvtier import Tier
from kvtier.types import ROOT_PARENT
from kvtier.v1 import blocks_pb2, caches_pb2, common_pb2
from kvtier.wire import spec_to_wire
from tests.integration.blocks import SLOT_BYTES, SPEC, chain, sizes
from tests.integration.raw import RawClient, attached
from tests.integration.seeing import state

Code = grpc.StatusCode
BAD, MISSING, NOT_NOW = Code.INVALID_ARGUMENT, Code.NOT_FOUND, Code.FAILED_PRECONDITION
DEVICE, HOST, DISK = common_pb2.TIER_DEVICE, common_pb2.TIER_HOST, common_pb2.TIER_DISK
MAX32, MAX64 = 2**32 - 1, 2**64 - 1
"""-1, as it arrives in unsigned fields."""

HOUR_NS = 3600 * 10**9
MAX_KEYS = 16_384
KEYS = chain("stored", 3)
NEW = chain("new", 2)
PACKED, PACKED_NEW = b"".join(KEYS), b"".join(NEW)


class Scene(NamedTuple):
    """What the requests are about: caches by id, leases, slots."""

    raw: RawClient
    cache: int
    """Device 4, host 4, disk 8; ``KEYS`` are stored on the device."""
    host_only: int
    unopened: int
    lease: int
    """Two blank host slots."""
    slots: list[int]
    foreign: int
    """A lease of another session, which is still there."""
    ended: int
    """A lease of a session that has ended."""
    released: int


class Case(NamedTuple):
    """A call and what it must be answered. ``value`` and ``limit``: parts of the detail's."""

    method: str
    request: Callable[[Scene], Message]
    code: grpc.StatusCode
    field: str
    value: str = ""
    limit: str = ""
    reason: str = "BAD_ARGUMENT"


@asynccontextmanager
async def setting(address, name):
    async with attached(address) as raw, attached(address) as other:
        cache = (await raw.open(name, budgets=sizes(device=4, host=4, disk=8))).cache_id
        await raw.commit(cache, stored := await raw.reserve(cache, Tier.DEVICE, 3), KEYS)
        await release(raw, cache, stored.lease_id)
        mine = await raw.reserve(cache, Tier.HOST, 2)
        released = await raw.reserve(cache, Tier.HOST, 1)
        await release(raw, cache, released.lease_id)
        host_only = (await raw.open(f"{name}-host", budgets=sizes(host=2))).cache_id
        await other.open(name)
        unopened = (await other.open(f"{name}-other", budgets=sizes(host=1))).cache_id
        foreign = (await other.reserve(cache, Tier.HOST, 1)).lease_id
        async with attached(address) as gone:
            await gone.open(name)
            ended = (await gone.reserve(cache, Tier.HOST, 1)).lease_id
        yield Scene(raw, cache, host_only, unopened, mine.lease_id, list(mine.slots), foreign, ended, released.lease_id)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def scene(daemon):
    """One for all cases, since none of them changes anything."""
    async with setting(daemon.address, "bad-input") as scene:
        yield scene


async def release(raw, cache, *leases):
    await raw.call(raw.stubs.blocks.Release, blocks_pb2.ReleaseRequest(cache_id=cache, lease_ids=leases))


Build = Callable[[Scene], Message]


def request(kind, **good):
    """Makes requests of a kind with nothing wrong but what is said. Fields given as functions depend on the scene."""

    def changed(**changes):
        fields = good | changes
        return lambda scene: kind(**{name: of(scene) if callable(of) else of for name, of in fields.items()})

    return changed


def its_cache(scene):
    return scene.cache


matching = request(blocks_pb2.MatchRequest, cache_id=its_cache, keys=PACKED)
locating = request(blocks_pb2.LocateRequest, cache_id=its_cache, keys=PACKED)
checking = request(blocks_pb2.ChecksumsRequest, cache_id=its_cache, keys=PACKED)
touching = request(blocks_pb2.TouchRequest, cache_id=its_cache, keys=PACKED)
reserving = request(blocks_pb2.ReserveRequest, cache_id=its_cache, tier=HOST, count=1)
committing = request(
    blocks_pb2.CommitRequest,
    cache_id=its_cache,
    lease_id=lambda s: s.lease,
    slots=lambda s: s.slots,
    keys=PACKED_NEW,
    parents=ROOT_PARENT + NEW[0],
)
releasing = request(blocks_pb2.ReleaseRequest, cache_id=its_cache, lease_ids=lambda s: [s.lease])
moving = request(blocks_pb2.MoveRequest, cache_id=its_cache, to=DISK, keys=PACKED)
dropping = request(blocks_pb2.DropRequest, cache_id=its_cache, keys=PACKED)
listing = request(blocks_pb2.ListBlocksRequest, cache_id=its_cache)
opening = request(caches_pb2.OpenRequest, name="never-made", spec=spec_to_wire(SPEC))
closing = request(caches_pb2.CloseRequest, cache_id=its_cache)


def acquiring(*chains, **changes):
    """Chains are keys and min_blocks."""
    listed = [blocks_pb2.Chain(keys=keys, min_blocks=least) for keys, least in chains]
    return request(blocks_pb2.AcquireRequest, cache_id=its_cache, tier=DEVICE, chains=listed)(**changes)


def acquiring_stored(**changes):
    return acquiring((PACKED, 0), **changes)


def budgets(*pairs):
    return [caches_pb2.TierBudget(tier=common_pb2.Tier.ValueType(tier), bytes=size) for tier, size in pairs]


def spec(**changes):
    message = spec_to_wire(SPEC)
    for field, value in changes.items():
        if field == "groups":
            del message.groups[:]
            message.groups.extend(value)
        else:
            setattr(message, field, value)
    return message


def group(**pool):
    good: dict[str, Any] = {"layers": 1, "kv_heads": 1, "head_size": 8, "kv_factor": 2}
    return caches_pb2.WindowGroupSpec(pools=[caches_pb2.PoolSpec(**(good | pool))])


def sliding(tokens):
    message = group()
    message.window_tokens = tokens
    return message


TIMEOUTS = [
    ("an hour and a bit", HOUR_NS + 1),
    ("minus one", MAX64),
]

CASES = {
    # whose cache
    "match: unknown cache": Case("Match", matching(cache_id=999), MISSING, "cache_id", "999", reason="UNKNOWN_CACHE"),
    "match: no cache": Case("Match", matching(cache_id=0), MISSING, "cache_id", "0", reason="UNKNOWN_CACHE"),
    "match: negative cache": Case(
        "Match", matching(cache_id=MAX64), MISSING, "cache_id", str(MAX64), reason="UNKNOWN_CACHE"
    ),
    **{
        f"{method}: cache not opened": Case(
            method, build(cache_id=lambda s: s.unopened), NOT_NOW, "cache_id", reason="CACHE_NOT_OPENED"
        )
        for method, build in {
            "Match": matching,
            "Locate": locating,
            "Checksums": checking,
            "Touch": touching,
            "Reserve": reserving,
            "Commit": committing,
            "Acquire": acquiring_stored,
            "Release": releasing,
            "Move": moving,
            "Drop": dropping,
            "List": listing,
            "Close": closing,
        }.items()
    },
    **{
        f"{method}: unknown cache": Case(
            method, build(cache_id=12345), MISSING, "cache_id", "12345", reason="UNKNOWN_CACHE"
        )
        for method, build in {
            "Reserve": reserving,
            "Commit": committing,
            "Acquire": acquiring_stored,
            "Release": releasing,
            "Move": moving,
            "Drop": dropping,
            "List": listing,
            "Close": closing,
        }.items()
    },
    # which group
    **{
        f"{method}: group {number}": Case(method, build(group=number), BAD, "group", str(number), "0 to 0")
        for number in (1, MAX32)
        for method, build in {
            "Match": matching,
            "Locate": locating,
            "Checksums": checking,
            "Touch": touching,
            "Reserve": reserving,
            "Acquire": acquiring_stored,
            "Move": moving,
            "Drop": dropping,
            "List": listing,
        }.items()
    },
    # keys
    **{
        f"{method}: {what}": Case(method, build(keys=keys), BAD, "keys", value, limit)
        for what, keys, value, limit in (
            ("no keys", b"", "0 bytes", "keys of 32 bytes"),
            ("a short key", PACKED[:-1], "95 bytes", "keys of 32 bytes"),
            ("one byte", b"x", "1 bytes", "keys of 32 bytes"),
            ("too many keys", bytes(32 * (MAX_KEYS + 1)), f"{MAX_KEYS + 1} keys", f"at most {MAX_KEYS} keys"),
        )
        for method, build in {
            "Match": matching,
            "Locate": locating,
            "Checksums": checking,
            "Touch": touching,
            "Move": moving,
            "Drop": dropping,
            "Commit": committing,
        }.items()
    },
    **{
        f"{method}: a key twice": Case(
            method, build(keys=PACKED + KEYS[1]), BAD, "keys[3]", KEYS[1].hex(), "different from keys[1]"
        )
        for method, build in {
            "Match": matching,
            "Locate": locating,
            "Checksums": checking,
            "Touch": touching,
            "Move": moving,
            "Drop": dropping,
        }.items()
    },
    # reserve
    "reserve: none": Case("Reserve", reserving(count=0), BAD, "count", "0", "1 to 4"),
    "reserve: more than the tier has": Case("Reserve", reserving(count=5), BAD, "count", "5", "1 to 4"),
    "reserve: minus one": Case("Reserve", reserving(count=MAX32), BAD, "count", str(MAX32), "1 to 4"),
    "reserve: on disk": Case("Reserve", reserving(tier=DISK), BAD, "tier", "disk", "device or host"),
    "reserve: in no tier": Case("Reserve", reserving(tier=0), BAD, "tier", "TIER_UNSPECIFIED", "device or host"),
    "reserve: in a tier of the future": Case("Reserve", reserving(tier=9), BAD, "tier", "9", "device or host"),
    "reserve: in a tier that the cache lacks": Case(
        "Reserve", reserving(cache_id=lambda s: s.host_only, tier=DEVICE), BAD, "tier", "device", "host"
    ),
    **{
        f"reserve: {what}": Case("Reserve", reserving(timeout_ns=ns), BAD, "timeout_ns", str(ns), f"0 to {HOUR_NS}")
        for what, ns in TIMEOUTS
    },
    # commit
    "commit: unknown lease": Case("Commit", committing(lease_id=10**6), MISSING, "", reason="UNKNOWN_LEASE"),
    "commit: no lease": Case("Commit", committing(lease_id=0), MISSING, "", reason="UNKNOWN_LEASE"),
    "commit: another session's lease": Case(
        "Commit", committing(lease_id=lambda s: s.foreign), Code.PERMISSION_DENIED, "", reason="FOREIGN_LEASE"
    ),
    "commit: a lease that ended with its session": Case(
        "Commit", committing(lease_id=lambda s: s.ended), MISSING, "", reason="UNKNOWN_LEASE"
    ),
    "commit: a released lease": Case(
        "Commit", committing(lease_id=lambda s: s.released), MISSING, "", reason="UNKNOWN_LEASE"
    ),
    "commit: a key twice": Case(
        "Commit", committing(keys=NEW[0] * 2), BAD, "keys[1]", NEW[0].hex(), "different from keys[0]"
    ),
    "commit: fewer slots than keys": Case(
        "Commit", committing(slots=lambda s: s.slots[:1]), BAD, "slots", "1 slots", "2 slots"
    ),
    "commit: more slots than keys": Case(
        "Commit", committing(keys=NEW[0], parents=ROOT_PARENT), BAD, "slots", "2 slots", "1 slots"
    ),
    "commit: a slot twice": Case(
        "Commit", committing(slots=lambda s: [s.slots[0]] * 2), BAD, "slots", "", "each slot once"
    ),
    "commit: a slot of another lease": Case(
        "Commit", committing(slots=lambda s: [s.slots[0], 6 - sum(s.slots)]), BAD, "slots", "", "a blank slot of lease"
    ),
    "commit: a slot that does not exist": Case(
        "Commit", committing(slots=lambda s: [s.slots[0], MAX32]), BAD, "slots", str(MAX32), "a blank slot of lease"
    ),
    "commit: too few parents": Case("Commit", committing(parents=ROOT_PARENT), BAD, "parents", "32 bytes", "64 bytes"),
    "commit: no parents": Case("Commit", committing(parents=b""), BAD, "parents", "0 bytes", "64 bytes"),
    "commit: its own parent": Case(
        "Commit", committing(parents=ROOT_PARENT + NEW[1]), BAD, "parents[1]", NEW[1].hex(), "not its own parent"
    ),
    "commit: too few priorities": Case(
        "Commit", committing(priorities=b"\x01"), BAD, "priorities", "1 bytes", "2 bytes"
    ),
    "commit: a priority of 101": Case(
        "Commit", committing(priorities=bytes([100, 101])), BAD, "priorities[1]", "101", "0 to 100"
    ),
    "commit: a priority of 255": Case(
        "Commit", committing(priorities=bytes([255, 0])), BAD, "priorities[0]", "255", "0 to 100"
    ),
    # acquire
    "acquire: no chains": Case("Acquire", acquiring(), BAD, "chains", "0", "1 to 1024"),
    "acquire: too many chains": Case("Acquire", acquiring(*[(PACKED, 0)] * 1025), BAD, "chains", "1025", "1 to 1024"),
    "acquire: a chain without keys": Case(
        "Acquire", acquiring((PACKED, 0), (b"", 0)), BAD, "chains[1].keys", "0 bytes", "32 bytes"
    ),
    "acquire: a short key": Case("Acquire", acquiring((PACKED[1:], 0)), BAD, "chains[0].keys", "95 bytes", "32 bytes"),
    "acquire: a key twice in a chain": Case(
        "Acquire", acquiring((KEYS[0] * 2, 0)), BAD, "chains[0].keys[1]", KEYS[0].hex(), "different from"
    ),
    "acquire: more than there are": Case("Acquire", acquiring((PACKED, 4)), BAD, "chains[0].min_blocks", "4", "0 to 3"),
    "acquire: minus one block": Case(
        "Acquire", acquiring((PACKED, MAX32)), BAD, "chains[0].min_blocks", str(MAX32), "0 to 3"
    ),
    "acquire: too many keys over all chains": Case(
        "Acquire",
        acquiring((b"".join(chain("many", MAX_KEYS)), 0), (PACKED, 0)),
        BAD,
        "chains[1].keys",
        "3 keys",
        "at most 0 keys",
    ),
    "acquire: on disk": Case("Acquire", acquiring((PACKED, 0), tier=DISK), BAD, "tier", "disk", "device or host"),
    "acquire: in no tier": Case("Acquire", acquiring((PACKED, 0), tier=0), BAD, "tier", "TIER_UNSPECIFIED"),
    **{
        f"acquire: {what}": Case("Acquire", acquiring((PACKED, 0), timeout_ns=ns), BAD, "timeout_ns", str(ns))
        for what, ns in TIMEOUTS
    },
    # release
    "release: nothing": Case("Release", releasing(lease_ids=[]), BAD, "lease_ids", "0", "1 to"),
    "release: unknown": Case("Release", releasing(lease_ids=[10**6]), MISSING, "", reason="UNKNOWN_LEASE"),
    "release: a second time": Case(
        "Release", releasing(lease_ids=lambda s: [s.released]), MISSING, "", reason="UNKNOWN_LEASE"
    ),
    "release: a part of more than was leased": Case(
        "Release", releasing(first_blocks=[10**6]), BAD, "first_blocks", str(10**6), "0 to"
    ),
    "release: parts of too many": Case(
        "Release", releasing(first_blocks=[0, 0]), BAD, "first_blocks", "2", "one a lease"
    ),
    "release: twice in a call": Case(
        "Release", releasing(lease_ids=lambda s: [s.lease, s.lease]), BAD, "lease_ids", "", "each lease once"
    ),
    "release: one's own and another's": Case(
        "Release",
        releasing(lease_ids=lambda s: [s.lease, s.foreign]),
        Code.PERMISSION_DENIED,
        "",
        reason="FOREIGN_LEASE",
    ),
    "release: one's own and one that is gone": Case(
        "Release", releasing(lease_ids=lambda s: [s.lease, s.ended]), MISSING, "", reason="UNKNOWN_LEASE"
    ),
    "release: too many": Case(
        "Release", releasing(lease_ids=range(1, 16_386)), BAD, "lease_ids", "16385", "1 to 16384"
    ),
    # move
    "move: to no tier": Case("Move", moving(to=0), BAD, "to", "TIER_UNSPECIFIED", "device or host or disk"),
    "move: to a tier of the future": Case("Move", moving(to=4), BAD, "to", "4", "device or host or disk"),
    "move: to a tier that the cache lacks": Case(
        "Move", moving(cache_id=lambda s: s.host_only), BAD, "to", "disk", "host"
    ),
    **{f"move: {what}": Case("Move", moving(timeout_ns=ns), BAD, "timeout_ns", str(ns)) for what, ns in TIMEOUTS},
    # open
    **{
        f"open: name {what}": Case("Open", opening(name=name), BAD, "name", name[:8], "1 to 128 of")
        for what, name in {
            "empty": "",
            "too long": "x" * 129,
            "path": "../../etc",
            "with a slash": "a/b",
            "with a space": "a b",
            "with a newline": "a\n",
            "hidden": ".a",
            "flag": "-rf",
            "not ASCII": "caché",
            "dots": "..",
            "zero byte": "a\0b",
        }.items()
    },
    "open: without a spec": Case("Open", opening(spec=caches_pb2.CacheSpec()), BAD, "spec.model"),
    **{
        f"open: {what}": Case("Open", opening(spec=changed), BAD, f"spec.{field}", value)
        for what, changed, field, value in (
            ("no model", spec(model=""), "model", ""),
            ("a long model", spec(model="x" * 1000), "model", "xxx"),
            ("an unknown dtype", spec(dtype="float64"), "dtype", "float64"),
            ("no tokens", spec(tokens_per_block=0), "tokens_per_block", "0"),
            ("minus one token", spec(tokens_per_block=MAX32), "tokens_per_block", str(MAX32)),
            ("a rank beyond the world", spec(rank=3, world_size=2), "rank", "3"),
            ("an empty world", spec(world_size=0), "world_size", "0"),
            ("no groups", spec(groups=[]), "groups", "0"),
            ("two groups alike", spec(groups=[group(), group()]), "groups[1].window_tokens", "0"),
            ("two windows alike", spec(groups=[sliding(64), group(), sliding(64)]), "groups[2].window_tokens", "64"),
            ("an endless window", spec(groups=[sliding(2**31)]), "groups[0].window_tokens", str(2**31)),
            ("seventeen groups", spec(groups=[sliding(tokens) for tokens in range(17)]), "groups", "17"),
            ("a pool of a dtype of its own", spec(groups=[group(dtype="fp8")]), "groups[0].pools[0].dtype", "fp8"),
            ("no pools", spec(groups=[caches_pb2.WindowGroupSpec()]), "groups[0].pools", "0"),
            ("no layers", spec(groups=[group(layers=0)]), "groups[0].pools[0].layers", "0"),
            ("minus one head", spec(groups=[group(kv_heads=MAX32)]), "groups[0].pools[0].kv_heads", str(MAX32)),
            ("a factor of three", spec(groups=[group(kv_factor=3)]), "groups[0].pools[0].kv_factor", "3"),
            ("a gigantic block", spec(groups=[group(layers=4096, kv_heads=4096, head_size=65536)]), "groups[0]", ""),
        )
    },
    "open: a budget of no tier": Case(
        "Open", opening(budgets=budgets((0, SLOT_BYTES))), BAD, "budgets[0].tier", "TIER_UNSPECIFIED"
    ),
    "open: a budget twice": Case(
        "Open", opening(budgets=budgets((2, SLOT_BYTES), (2, SLOT_BYTES))), BAD, "budgets[1].tier", "host", "once"
    ),
    "open: a budget of nothing": Case("Open", opening(budgets=budgets((2, 0))), BAD, "budgets[host]", "0", "1 to"),
    "open: a budget of less than a slot": Case(
        "Open", opening(budgets=budgets((2, SLOT_BYTES - 1))), BAD, "budgets[host]", str(SLOT_BYTES - 1), "1 to"
    ),
}


def stub(raw, method):
    return getattr(raw.stubs.caches if method in ("Open", "Close") else raw.stubs.blocks, method)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
async def test_refused(scene, case):
    raw = scene.raw
    before = await state(raw)
    fault = await raw.refusal(stub(raw, case.method), case.request(scene))
    assert (fault.code, fault.reason, fault.detail.field) == (case.code, case.reason, case.field), fault
    assert case.value in fault.detail.value
    assert case.limit in fault.detail.limit
    assert len(fault.message) < 400, "a stranger's value is shown shortened"
    if case.code is BAD:
        assert fault.message == f"{case.field} = {fault.detail.value}: must be {fault.detail.limit}"
    assert await state(raw) == before


async def test_refused_calls_leave_a_lease_usable(daemon, name):
    async with setting(daemon.address, name) as scene:
        raw = scene.raw
        for case in CASES.values():
            if case.method in ("Commit", "Release"):
                await raw.refusal(stub(raw, case.method), case.request(scene))
        assert (await raw.call(raw.stubs.blocks.Commit, committing()(scene))).results == bytes(2)
        await raw.call(raw.stubs.blocks.Release, releasing()(scene))
