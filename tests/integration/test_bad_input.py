"""Bad input over the bare wire: refused with the code, field, value and limit that say what is wrong, changing nothing.

A negative size is a huge one by the time it is on the wire: fields are unsigned.
"""

import re
from collections.abc import Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest
import pytest_asyncio
from google.protobuf import descriptor_pool
from google.protobuf.message import Message

from kvtier import Tier
from kvtier.types import ROOT_PARENT
from kvtier.v1 import blocks_pb2, caches_pb2, common_pb2
from kvtier.wire import spec_to_wire
from tests.integration.blocks import SLOT_BYTES, SPEC, chain, sizes
from tests.integration.raw import RawClient, attached
from tests.integration.seeing import state

ROOT = Path(__file__).parents[2]
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
    """A call and its refusal. ``value`` and ``limit``: parts of the detail's."""

    method: str
    request: Callable[[Scene], Message]
    field: str
    value: str
    limit: str
    code: grpc.StatusCode
    reason: str


class Verb:
    """Makes requests of one method with nothing wrong but what is said. A field's value may depend on the scene."""

    def __init__(self, method: str, kind: type[Message], **good: Any) -> None:
        self.method = method
        self._kind = kind
        self._good = good

    def request(self, scene: Scene, **changes: Any) -> Message:
        fields = self._good | changes
        return self._kind(**{name: of(scene) if callable(of) else of for name, of in fields.items()})

    def refused(self, field, value="", limit="", *, code=BAD, reason="BAD_ARGUMENT", **changes):
        return Case(self.method, lambda scene: self.request(scene, **changes), field, value, limit, code, reason)


@asynccontextmanager
async def setting(address, name):
    async with attached(address) as raw, attached(address) as other:
        cache = (await raw.open(name, budgets=sizes(device=4, host=4, disk=8))).cache_id
        await raw.commit(cache, stored := await raw.reserve(cache, Tier.DEVICE, 3), KEYS)
        await give_back(raw, cache, stored.lease_id)
        mine = await raw.reserve(cache, Tier.HOST, 2)
        released = await raw.reserve(cache, Tier.HOST, 1)
        await give_back(raw, cache, released.lease_id)
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


async def give_back(raw, cache, *leases):
    await raw.call(raw.stubs.blocks.Release, blocks_pb2.ReleaseRequest(cache_id=cache, lease_ids=leases))


def cache_of(scene):
    return scene.cache


def chains(*pairs):
    """Keys and ``min_blocks`` of each."""
    return [blocks_pb2.Chain(keys=keys, min_blocks=least) for keys, least in pairs]


match = Verb("Match", blocks_pb2.MatchRequest, cache_id=cache_of, keys=PACKED)
locate = Verb("Locate", blocks_pb2.LocateRequest, cache_id=cache_of, keys=PACKED)
checksums = Verb("Checksums", blocks_pb2.ChecksumsRequest, cache_id=cache_of, keys=PACKED)
touch = Verb("Touch", blocks_pb2.TouchRequest, cache_id=cache_of, keys=PACKED)
reserve = Verb("Reserve", blocks_pb2.ReserveRequest, cache_id=cache_of, tier=HOST, count=1)
commit = Verb(
    "Commit",
    blocks_pb2.CommitRequest,
    cache_id=cache_of,
    lease_id=lambda scene: scene.lease,
    slots=lambda scene: scene.slots,
    keys=PACKED_NEW,
    parents=ROOT_PARENT + NEW[0],
)
acquire = Verb("Acquire", blocks_pb2.AcquireRequest, cache_id=cache_of, tier=DEVICE, chains=chains((PACKED, 0)))
release = Verb("Release", blocks_pb2.ReleaseRequest, cache_id=cache_of, lease_ids=lambda scene: [scene.lease])
join = Verb("Join", blocks_pb2.JoinRequest, cache_id=cache_of, lease_id=lambda scene: scene.foreign)
move = Verb("Move", blocks_pb2.MoveRequest, cache_id=cache_of, to=DISK, keys=PACKED)
drop = Verb("Drop", blocks_pb2.DropRequest, cache_id=cache_of, keys=PACKED)
listing = Verb("List", blocks_pb2.ListBlocksRequest, cache_id=cache_of)
open_ = Verb("Open", caches_pb2.OpenRequest, name="never-made", spec=spec_to_wire(SPEC))
pin = Verb("Pin", blocks_pb2.PinRequest, cache_id=cache_of, tier=HOST, keys=PACKED)
retain = Verb("SetRetention", blocks_pb2.SetRetentionRequest, cache_id=cache_of, keys=PACKED, priorities=bytes(3))
close = Verb("Close", caches_pb2.CloseRequest, cache_id=cache_of)

BY_KEYS = (match, locate, checksums, touch, move, drop, pin, retain)
BY_GROUP = (locate, checksums, touch, move, drop, pin, retain, reserve, listing)
BY_GROUPS = (match, acquire)
BY_CACHE = (*BY_GROUP, *BY_GROUPS, commit, release, close)


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


def sliding(tokens, **more):
    pools = group().pools
    return caches_pb2.WindowGroupSpec(pools=pools, window_tokens=tokens, **more)


UNKNOWN_CACHE = {"code": MISSING, "reason": "UNKNOWN_CACHE"}
UNKNOWN_LEASE = {"code": MISSING, "reason": "UNKNOWN_LEASE"}
FOREIGN_LEASE = {"code": Code.PERMISSION_DENIED, "reason": "FOREIGN_LEASE"}
TOO_LONG_NS = HOUR_NS + 1
MANY = b"".join(chain("many", MAX_KEYS + 1))

NAMES = ("", "x" * 129, "../../etc", "a/b", "a b", "a\n", ".a", "-rf", "caché", "..", "a\0b")

NO_PARENTS: dict[str, Any] = {"Commit": {"slots": [], "parents": b""}}

CASES = [
    *(verb.refused("cache_id", "12345", cache_id=12345, **UNKNOWN_CACHE) for verb in BY_CACHE),
    *(
        verb.refused("cache_id", cache_id=lambda scene: scene.unopened, code=NOT_NOW, reason="CACHE_NOT_OPENED")
        for verb in BY_CACHE
    ),
    match.refused("cache_id", str(MAX64), cache_id=MAX64, **UNKNOWN_CACHE),
    *(verb.refused("group", str(group), "0 to 0", group=group) for verb in BY_GROUP for group in (1, MAX32)),
    *(verb.refused("groups[0]", str(group), "0 to 0", groups=[group]) for verb in BY_GROUPS for group in (1, MAX32)),
    *(verb.refused("groups", "2", "0 to 1", groups=[0, 0]) for verb in BY_GROUPS),
    *(
        refusal
        for verb in (*BY_KEYS, commit)
        for refusal in (
            verb.refused("keys", "no keys", "at least one", keys=b"", **NO_PARENTS.get(verb.method, {})),
            verb.refused("keys", "95 bytes", "keys of 32 bytes", keys=PACKED[:-1]),
            verb.refused("keys", f"{MAX_KEYS + 1} keys", f"at most {MAX_KEYS} keys", keys=MANY),
        )
    ),
    *(verb.refused("keys[3]", KEYS[1].hex(), "different from keys[1]", keys=PACKED + KEYS[1]) for verb in BY_KEYS),
    # reserve
    reserve.refused("count", "0", "1 to 4", count=0),
    reserve.refused("count", "5", "1 to 4", count=5),
    reserve.refused("count", str(MAX32), "1 to 4", count=MAX32),
    reserve.refused("tier", "disk", "device or host", tier=DISK),
    reserve.refused("tier", "TIER_UNSPECIFIED", "device or host", tier=0),
    reserve.refused("tier", "9", "device or host", tier=9),
    reserve.refused("tier", "device", "host", cache_id=lambda scene: scene.host_only, tier=DEVICE),
    *(
        verb.refused("timeout_ns", str(ns), f"0 to {HOUR_NS}", timeout_ns=ns)
        for verb in (reserve, acquire, move)
        for ns in (TOO_LONG_NS, MAX64)
    ),
    # commit
    commit.refused("", lease_id=10**6, **UNKNOWN_LEASE),
    commit.refused("", lease_id=lambda scene: scene.foreign, **FOREIGN_LEASE),
    commit.refused("", lease_id=lambda scene: scene.ended, **UNKNOWN_LEASE),
    commit.refused("", lease_id=lambda scene: scene.released, **UNKNOWN_LEASE),
    commit.refused("keys[1]", NEW[0].hex(), "different from keys[0]", keys=NEW[0] * 2),
    commit.refused("slots", "1 slots", "2 slots", slots=lambda scene: scene.slots[:1]),
    commit.refused("slots", "2 slots", "1 slots", keys=NEW[0], parents=ROOT_PARENT),
    commit.refused("slots", "", "each slot once", slots=lambda scene: [scene.slots[0]] * 2),
    commit.refused("slots", "", "a blank slot of lease", slots=lambda scene: [scene.slots[0], 6 - sum(scene.slots)]),
    commit.refused("slots", str(MAX32), "a blank slot of lease", slots=lambda scene: [scene.slots[0], MAX32]),
    commit.refused("parents", "32 bytes", "64 bytes", parents=ROOT_PARENT),
    commit.refused("parents[1]", NEW[1].hex(), "not its own parent", parents=ROOT_PARENT + NEW[1]),
    commit.refused("priorities", "1 bytes", "2 bytes", priorities=b"\x01"),
    commit.refused("priorities[1]", "101", "0 to 100", priorities=bytes([100, 101])),
    retain.refused("durations_ms[1]", "4294967295", "at most 4294967294", durations_ms=[0, MAX32, 0]),
    # acquire
    acquire.refused("chains", "0", "1 to 1024", chains=[]),
    acquire.refused("chains[1].keys", "no keys", "at least one", chains=chains((PACKED, 0), (b"", 0))),
    acquire.refused("chains", "1025", "1 to 1024", chains=chains((PACKED, 0)) * 1025),
    acquire.refused("chains[0].keys", "95 bytes", "32 bytes", chains=chains((PACKED[1:], 0))),
    acquire.refused("chains[0].keys[1]", KEYS[0].hex(), "different from", chains=chains((KEYS[0] * 2, 0))),
    acquire.refused("chains[0].min_blocks", "4", "0 to 3", chains=chains((PACKED, 4))),
    acquire.refused("chains[1].keys", "3 keys", "at most 0 keys", chains=chains((MANY[32:], 0), (PACKED, 0))),
    acquire.refused("tier", "disk", "device or host", tier=DISK),
    acquire.refused("tier", "TIER_UNSPECIFIED", tier=0),
    # release
    release.refused("lease_ids", "0", "1 to", lease_ids=[]),
    release.refused("lease_ids", "16385", "1 to 16384", lease_ids=range(1, 16_386)),
    release.refused("lease_ids", "", "each lease once", lease_ids=lambda scene: [scene.lease, scene.lease]),
    release.refused("lease_ids", "2", "one lease, of which", lease_ids=lambda s: [s.lease, s.foreign], slots=[0]),
    release.refused("", lease_ids=[10**6], **UNKNOWN_LEASE),
    release.refused("", lease_ids=lambda scene: [scene.released], **UNKNOWN_LEASE),
    release.refused("", lease_ids=lambda scene: [scene.lease, scene.ended], **UNKNOWN_LEASE),
    release.refused("", lease_ids=lambda scene: [scene.lease, scene.foreign], **FOREIGN_LEASE),
    # join
    join.refused("", lease_id=10**6, **UNKNOWN_LEASE),
    join.refused("", lease_id=lambda scene: scene.ended, **UNKNOWN_LEASE),
    join.refused("", secret=b"", **FOREIGN_LEASE),
    join.refused("", secret=bytes(16), **FOREIGN_LEASE),
    # move
    move.refused("to", "TIER_UNSPECIFIED", "device or host or disk", to=0),
    move.refused("to", "5", "device or host or disk", to=5),
    move.refused("to", "remote", "device or host or disk", to=4),
    move.refused("to", "disk", "host", cache_id=lambda scene: scene.host_only),
    # open
    *(open_.refused("name", name[:8], "1 to 128 of", name=name) for name in NAMES),
    *(
        open_.refused(f"spec.{field}", value, spec=changed)
        for field, value, changed in (
            ("model", "", caches_pb2.CacheSpec()),
            ("model", "xxx", spec(model="x" * 1000)),
            ("dtype", "float64", spec(dtype="float64")),
            ("tokens_per_block", "0", spec(tokens_per_block=0)),
            ("tokens_per_block", str(MAX32), spec(tokens_per_block=MAX32)),
            ("rank", "3", spec(rank=3, world_size=2)),
            ("world_size", "0", spec(world_size=0)),
            ("groups", "0", spec(groups=[])),
            ("groups", "17", spec(groups=[sliding(tokens) for tokens in range(17)])),
            ("groups[1].flat", "True", spec(groups=[group(), sliding(64, flat=True)])),
            ("groups[0].sink_tokens", "16", spec(groups=[sliding(0, sink_tokens=16)])),
            ("groups[0].sink_tokens", str(2**31), spec(groups=[sliding(64, sink_tokens=2**31)])),
            ("groups[0].window_tokens", str(2**31), spec(groups=[sliding(2**31)])),
            ("groups[0].pools", "0", spec(groups=[caches_pb2.WindowGroupSpec()])),
            ("groups[0].pools[0].dtype", "fp8", spec(groups=[group(dtype="fp8")])),
            ("groups[0].pools[0].layers", "0", spec(groups=[group(layers=0)])),
            ("groups[0].pools[0].kv_heads", str(MAX32), spec(groups=[group(kv_heads=MAX32)])),
            ("groups[0].pools[0].kv_factor", "3", spec(groups=[group(kv_factor=3)])),
            ("groups[0]", "", spec(groups=[group(layers=4096, kv_heads=4096, head_size=65536)])),
        )
    ),
    open_.refused("budgets[0].tier", "TIER_UNSPECIFIED", budgets=budgets((0, SLOT_BYTES))),
    open_.refused("budgets[1].tier", "host", "once", budgets=budgets((2, SLOT_BYTES), (2, SLOT_BYTES))),
    open_.refused("budgets[host]", str(SLOT_BYTES - 1), "1 to", budgets=budgets((2, SLOT_BYTES - 1))),
]


def stub(raw, method):
    return getattr(raw.stubs.caches if method in ("Open", "Close") else raw.stubs.blocks, method)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.method}-{case.field or case.reason}")
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
        for case in CASES:
            if case.method in ("Commit", "Release"):
                await raw.refusal(stub(raw, case.method), case.request(scene))
        assert (await raw.call(raw.stubs.blocks.Commit, commit.request(scene))).results == bytes(2)
        await raw.call(raw.stubs.blocks.Release, release.request(scene))


ROWS = re.findall(
    r"^\| (`(?:Caches|Blocks|Transfer)\..*) \| (.*) \|$", (ROOT / "docs/wire.md").read_text(), re.MULTILINE
)
NEEDED = {call: re.findall(r"`(\w+)`", fields) for calls, fields in ROWS for call in re.findall(r"`([\w.]+)`", calls)}
VERBS = (match, locate, reserve, commit, acquire, release, move, drop, pin, retain, open_, close)


def test_the_page_knows_the_calls_and_their_fields():
    assert {call.partition(".")[2] for call in NEEDED} == {verb.method for verb in VERBS} | {"Put", "Get"}
    for call, fields in NEEDED.items():
        service, method = call.split(".")
        asked = descriptor_pool.Default().FindServiceByName(f"kvtier.v1.{service}").methods_by_name[method].input_type
        assert set(fields) <= names_in(asked), call


def names_in(message):
    below = (names_in(field.message_type) for field in message.fields if field.message_type is not None)
    return {field.name for field in message.fields}.union(*below)


def cleared(message, name):
    """Clears a field of the message, or of the first part that has it."""
    if name in message.DESCRIPTOR.fields_by_name:
        message.ClearField(name)
        return True
    parts = [value for field, value in message.ListFields() if field.message_type is not None]
    return any(cleared(one, name) for part in parts for one in (part if isinstance(part, Sequence) else [part]))


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.method)
async def test_a_needed_field_left_out_is_refused(scene, verb):
    (fields,) = (fields for call, fields in NEEDED.items() if call.endswith(f".{verb.method}"))
    for field in fields:
        request = verb.request(scene, **({"name": "not-there"} if verb is open_ else {}))
        assert cleared(request, field)
        code = (await scene.raw.refusal(stub(scene.raw, verb.method), request)).code
        assert code is (MISSING if field == "spec" else BAD), field
