"""kvtier's events in vLLM's form, read by structs and by a router that follow the published form."""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvtier.abi.words import TIERS
from kvtier.bridge import Encoding, Options
from kvtier.bridge.vllm import MEDIA, AllBlocksCleared, BlockRemoved, BlockStored, VllmEvent, VllmEvents, batch_of
from kvtier.events import BlockTokens, Event, SnapshotEnd, SnapshotSlice, SnapshotStart, WatchItem
from kvtier.types import Cause, Cursor, EventType, tiers_of
from tests import vllm_reader as vllm
from tests.vllm_reader import Router

KEYS = [hashlib.sha256(bytes([n])).digest() for n in range(8)]
ROOT = bytes(32)
STEP = 2
DEVICE, HOST, DISK = (tier.bit for tier in TIERS)
END = SnapshotEnd(Cursor(1, 1))
CLEARED = AllBlocksCleared()
PLACE = "ipc:///nowhere"
PLAIN = Options(PLACE)


def number(key: bytes) -> int:
    return int.from_bytes(key[:8], "big")


def event(kind: EventType, keys: list[bytes], **fields: Any) -> Event:
    whole: dict[str, Any] = {"group": 0, "packed_keys": b"".join(keys)}
    return Event(epoch=1, event_id=1, type=kind, cause=Cause.COMMIT, cache="c", time_ns=0, **whole | fields)


def stored(*blocks: int, parents: list[int | None], residency: int = DEVICE, **fields: Any) -> Event:
    return event(
        EventType.STORED,
        [KEYS[block] for block in blocks],
        packed_parents=b"".join(ROOT if parent is None else KEYS[parent] for parent in parents),
        residency=bytes([residency]) * len(blocks),
        priorities=bytes([35]) * len(blocks),
        **fields,
    )


def updated(*blocks: int, residency: int, **fields: Any) -> Event:
    places = bytes([residency]) * len(blocks)
    return event(EventType.UPDATED, [KEYS[block] for block in blocks], residency=places, **fields)


def removed(*blocks: int) -> Event:
    return event(EventType.REMOVED, [KEYS[block] for block in blocks], residency=bytes(len(blocks)))


def part(*blocks: int, parents: list[int | None], residency: int = DEVICE) -> SnapshotSlice:
    told = stored(*blocks, parents=parents, residency=residency)
    return SnapshotSlice(
        "c", 0, told.packed_keys, told.packed_parents, told.residency, told.priorities, tokens_per_block=STEP
    )


def begun(*items: WatchItem, options: Options = PLAIN) -> VllmEvents:
    """After a snapshot of empty groups and these items."""
    events = VllmEvents(options)
    for item in (SnapshotStart(), part(parents=[]), replace(part(parents=[]), group=1), END, *items):
        list(events.of(item))
    return events


def told(events: VllmEvents, *items: WatchItem) -> list[VllmEvent]:
    return [each for item in items for step in events.of(item) for each in step]


def test_a_snapshot_comes_after_all_blocks_cleared() -> None:
    events = VllmEvents(PLAIN)
    assert told(events, SnapshotStart(), part(0, 1, parents=[None, 0], residency=DEVICE | DISK)) == []
    cleared, *rest = told(events, END)
    assert cleared == CLEARED
    assert [(each.medium, each.block_hashes) for each in rest if isinstance(each, BlockStored)] == [
        ("GPU", [number(KEYS[0]), number(KEYS[1])]),
        ("DISK", [number(KEYS[0]), number(KEYS[1])]),
    ]


def test_a_block_and_its_place_in_its_chain() -> None:
    tokens = (BlockTokens((1, 2860)), BlockTokens((5, 6)))
    (first, second) = told(
        begun(options=Options(PLACE, tokens=True)),
        stored(0, 1, parents=[None, 0], tokens=tokens),
        stored(2, parents=[1], window_tokens=1024),
    )
    assert first == BlockStored(
        block_hashes=[number(KEYS[0]), number(KEYS[1])],
        parent_block_hash=None,
        token_ids=[1, 2860, 5, 6],
        block_size=STEP,
        lora_id=None,
        medium="GPU",
        lora_name=None,
        extra_keys=[None, None],
        group_idx=0,
        kv_cache_spec_kind="full_attention",
        kv_cache_spec_sliding_window=None,
    )
    assert isinstance(second, BlockStored)
    assert (second.parent_block_hash, second.token_ids, second.extra_keys) == (number(KEYS[1]), [], None)
    assert (second.kv_cache_spec_kind, second.kv_cache_spec_sliding_window) == ("sliding_window", 1024)


def test_a_move_is_stored_there_before_it_is_removed_here_in_one_step() -> None:
    events = begun(stored(0, 1, parents=[None, 0]))
    ((there, here),) = events.of(updated(1, 0, residency=HOST))
    assert isinstance(there, BlockStored) and isinstance(here, BlockRemoved)
    assert (there.medium, there.block_hashes) == ("CPU", [number(KEYS[0]), number(KEYS[1])])
    assert (here.medium, here.block_hashes) == ("GPU", [number(KEYS[1]), number(KEYS[0])])


def test_a_block_that_moves_takes_its_tokens_along() -> None:
    """Dynamo places a block by its tokens, in each tier."""
    events = begun(stored(0, parents=[None], tokens=(BlockTokens((7, 8)),)), options=Options(PLACE, tokens=True))
    there, _ = told(events, updated(0, residency=HOST))
    assert isinstance(there, BlockStored) and there.token_ids == [7, 8]


@pytest.mark.parametrize("tokens", [True, False])
def test_a_partial_block_is_none_of_vllms(tokens: bool) -> None:
    of_prompt = (BlockTokens((1, 2)), BlockTokens((3,)))
    events = begun(options=Options(PLACE, tokens=tokens))
    (only,) = told(events, stored(0, 1, parents=[None, 0], tokens=of_prompt), updated(1, residency=HOST))
    assert isinstance(only, BlockStored) and only.block_hashes == [number(KEYS[0])]


def test_cleared_removes_one_by_one_and_says_so_where_nothing_is_left_of_any_group() -> None:
    other = replace(stored(0, parents=[None]), group=1)
    events = begun(stored(0, parents=[None]), other)
    cleared = event(EventType.CLEARED, [])
    assert told(events, cleared) == [BlockRemoved([number(KEYS[0])], "GPU", 0)]
    assert told(events, replace(cleared, group=1)) == [BlockRemoved([number(KEYS[0])], "GPU", 1), CLEARED]
    assert told(events, cleared) == []


def test_only_the_difference_is_told_after_a_gap() -> None:
    events = begun(stored(0, 1, parents=[None, 0]), stored(2, parents=[None]))
    again = (SnapshotStart(), part(0, 1, parents=[None, 0]), updated(1, residency=HOST), part(3, parents=[0]), END)
    assert [
        (type(each).__name__, each.medium, each.block_hashes)
        for each in told(events, *again)
        if isinstance(each, BlockStored | BlockRemoved)
    ] == [
        ("BlockRemoved", "GPU", [number(KEYS[2])]),
        ("BlockStored", "CPU", [number(KEYS[1])]),
        ("BlockStored", "GPU", [number(KEYS[3])]),
        ("BlockRemoved", "GPU", [number(KEYS[1])]),
    ]


def test_what_cannot_be_named_or_placed_is_left_out_for_good() -> None:
    bare = stored(0, 1, parents=[None, 0], event_hash="v1_block_key", packed_parent_hashes=bytes(16))
    events = begun(replace(bare, packed_hashes=bytes(8) + bytes(range(8))))
    assert events.blocks == 0
    assert told(events, updated(0, 1, residency=HOST), removed(1, 0)) == []


def test_another_adapter_is_not_taken_for_the_base_model() -> None:
    tokens = tuple(BlockTokens((n, n), lora_id=lora) for n, lora in enumerate((None, 7, 8)))
    options = Options(PLACE, tokens=True, lora_names={7: "sql"})
    events = told(begun(options=options), stored(0, 1, 2, parents=[None, 0, 1], tokens=tokens))
    adapters = [(each.lora_id, each.lora_name, each.extra_keys) for each in events if isinstance(each, BlockStored)]
    assert adapters == [(None, None, [None]), (7, "sql", [["sql"]]), (8, "8", [["8"]])]


def test_items_and_the_salt_of_a_root_are_extra_keys() -> None:
    tokens = tuple(BlockTokens((1, 2), cache_salt="tenant", items=((b"\xaa" * 32, 3),)) for _ in range(2))
    (only,) = told(begun(options=Options(PLACE, tokens=True)), stored(0, 1, parents=[None, 0], tokens=tokens))
    assert isinstance(only, BlockStored)
    assert (only.extra_keys, only.cache_salt) == ([["aa" * 32, "tenant"], ["aa" * 32]], "tenant")


def test_tokens_stay_here_unless_they_are_asked_for() -> None:
    (only,) = told(begun(), stored(0, parents=[None], tokens=(BlockTokens((1, 2), cache_salt="tenant"),)))
    assert isinstance(only, BlockStored)
    assert (only.token_ids, only.extra_keys, only.cache_salt) == ([], None, None)


def test_one_group_of_several() -> None:
    events = begun(options=Options(PLACE, group=1))
    assert told(events, stored(0, parents=[None])) == []
    assert len(told(events, replace(stored(0, parents=[None]), group=1))) == 1


# -- the form on the wire

NUMBER = 2**64 - 1
STORED = BlockStored(
    block_hashes=[NUMBER, 5],
    parent_block_hash=7,
    token_ids=[1, 2, 3, 4],
    block_size=2,
    lora_id=3,
    medium="CPU",
    lora_name="sql",
    extra_keys=[["sql", "aa" * 32], ["sql"]],
    group_idx=1,
    kv_cache_spec_kind="sliding_window",
    kv_cache_spec_sliding_window=4096,
    cache_salt="tenant",
)
BARE = BlockStored([8], None, [], 2, None, "GPU", None, None, 0, "full_attention", None)
REMOVED = BlockRemoved([NUMBER, 0], "DISK", 0)
EVENTS: list[VllmEvent] = [STORED, BARE, REMOVED, CLEARED]


def packed(encoding: Encoding, *events: VllmEvent) -> bytes:
    return msgspec.msgpack.encode(batch_of(events, encoding, 12.5, 3))


def test_maps_are_byte_for_byte_what_vllm_s_encoder_makes() -> None:
    """But for the salt, which vLLM does not send by name."""
    events: list[VllmEvent] = [msgspec.structs.replace(STORED, cache_salt=None), BARE, REMOVED, CLEARED]
    payload = packed(Encoding.MAP, *events)
    batch = vllm.MAPS.decode(payload)
    assert (batch.ts, batch.data_parallel_rank) == (12.5, 3)
    assert [type(event) for event in batch.events] == [
        vllm.BlockStored,
        vllm.BlockStored,
        vllm.BlockRemoved,
        vllm.AllBlocksCleared,
    ]
    assert msgspec.msgpack.encode(batch) == payload


def test_arrays_are_byte_for_byte_what_vllm_s_encoder_made() -> None:
    payload = packed(Encoding.ARRAY, *EVENTS)
    batch = vllm.ARRAYS.decode(payload)
    assert [type(event) for event in batch.events] == [
        vllm.ArrayStored,
        vllm.ArrayStored,
        vllm.ArrayRemoved,
        vllm.ArrayCleared,
    ]
    assert msgspec.msgpack.encode(batch) == payload


def test_the_oldest_readers_understand_arrays() -> None:
    """Further fields are at the end, where a reader of vLLM 0.9 does not look."""
    _, (event,), _ = msgspec.msgpack.decode(packed(Encoding.ARRAY, STORED))
    first = msgspec.convert(event, vllm.FirstStored)
    assert (first.block_hashes, first.token_ids, first.lora_id) == ([NUMBER, 5], [1, 2, 3, 4], 3)


def test_the_salt_stands_in_maps_by_name() -> None:
    """As SGLang sends it; vLLM's readers skip it."""
    payload = packed(Encoding.MAP, STORED)
    _, (event,), _ = msgspec.msgpack.decode(payload)
    assert event["cache_salt"] == "tenant"
    assert len(vllm.MAPS.decode(payload).events) == 1


@pytest.mark.parametrize("encoding", Encoding)
def test_the_rank_is_always_a_number(encoding: Encoding) -> None:
    """AIBrix refuses a null there, Dynamo a batch of two."""
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(batch_of([CLEARED], encoding, 0.0, 0)))[2] == 0


# -- a router that follows


@dataclass
class Daemon:
    """Which blocks of a tree are where; what it does comes as the events that a daemon would send of it."""

    parents: dict[int, int | None] = field(default_factory=dict)
    places: dict[int, int] = field(default_factory=dict)

    def store(self, block: int, above: int, residency: int) -> Event | None:
        if block in self.places:
            return None
        parent = above if above in self.places else None
        self.parents[block], self.places[block] = parent, residency
        return stored(block, parents=[parent], residency=residency)

    def move(self, block: int, residency: int) -> Event | None:
        below = [each for each in self.places if each <= block]
        for each in below:
            self.places[each] = residency
        return updated(*sorted(below, reverse=True), residency=residency) if below else None

    def drop(self, block: int) -> Event | None:
        gone = [block] if block in self.places else []
        for each in gone:
            gone.extend(child for child, parent in self.parents.items() if parent == each and child in self.places)
        for each in gone:
            del self.places[each], self.parents[each]
        return removed(*reversed(gone)) if gone else None

    def clear(self) -> Event:
        self.parents, self.places = {}, {}
        return event(EventType.CLEARED, [])

    def slices(self) -> Iterator[SnapshotSlice]:
        """Children before parents as likely as not."""
        for block, residency in sorted(self.places.items(), reverse=True):
            yield part(block, parents=[self.parents[block]], residency=residency)

    @property
    def listing(self) -> dict[tuple[int | None, int | bytes], set[str]]:
        return {
            (0, number(KEYS[block])): {MEDIA[tier] for tier in tiers_of(places)}
            for block, places in self.places.items()
        }


BLOCKS = st.integers(0, len(KEYS) - 1)
PLACES = st.integers(1, 7)
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("store"), BLOCKS, BLOCKS, PLACES),
        st.tuples(st.just("move"), BLOCKS, PLACES),
        st.tuples(st.just("drop"), BLOCKS),
        st.tuples(st.just("clear")),
        st.tuples(st.just("miss"), st.integers(1, 5)),  # the next so many events never arrive
    ),
    max_size=40,
)


def published(steps: Iterable[list[VllmEvent]]) -> Iterator[bytes]:
    """A batch a step."""
    for step in steps:
        yield msgspec.msgpack.encode(batch_of(step, Encoding.MAP, 0.0, 0))


@given(ACTIONS, st.booleans())
@example([("store", 0, 0, 1), ("store", 3, 0, 1), ("miss", 2), ("clear",), ("store", 3, 0, 1)], False)
@settings(max_examples=300)
def test_a_router_knows_what_the_daemon_has(actions: list[tuple[Any, ...]], heeds_cleared: bool) -> None:
    """Whatever happens, over gaps, whether or not it heeds ``AllBlocksCleared``; so does one that comes late."""
    daemon, events, router = Daemon(), begun(), Router(heeds_cleared=heeds_cleared)
    missing = 0
    for verb, *arguments in actions:
        if verb == "miss":
            missing += arguments[0]
            continue
        item = getattr(daemon, verb)(*arguments)
        if missing:
            missing -= 1
            items: list[WatchItem] = [] if missing else [SnapshotStart(), *daemon.slices(), END]
        else:
            items = [item] if item is not None else []
        for each in items:
            for payload in published(events.of(each)):
                router.apply(payload)
        if not missing:
            assert router.listing == daemon.listing
            late = Router()
            for payload in published(events.everything()):
                late.apply(payload)
            assert late.listing == daemon.listing
