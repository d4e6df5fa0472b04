"""TensorRT-LLM's event JSON, to the field."""

import json
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier import TrtllmEvents
from kvtier.bridge.trtllm import WHOLE_WINDOW
from kvtier.cli.watch_lines import trtllm_lines
from kvtier.events import BlockTokens, Event, Gap, Heartbeat, SnapshotEnd, SnapshotSlice, SnapshotStart, WatchItem
from kvtier.types import Cause, Cursor, EventType, Tier

KEYS = [bytes([n]) * 32 for n in range(1, 6)]
NUMBERS = [2**64 - n for n in range(1, 6)]
"""Of blocks, unsigned: all of them over 2^63."""
TOKENS = BlockTokens((1, 2860), (0, 7), 5, "tenant", ((b"\xaa" * 32, 3),))
ROOT = bytes(32)


def numbers(*blocks: int) -> bytes:
    return b"".join(NUMBERS[block].to_bytes(8, "big") for block in blocks)


def event(kind: EventType, *blocks: int, **fields: Any) -> Event:
    named = {"event_hash": "v1_block_key", "packed_hashes": numbers(*blocks)} | fields
    keys = b"".join(KEYS[block] for block in blocks)
    of: dict[str, Any] = {"epoch": 1, "event_id": 42, "type": kind, "cause": Cause.COMMIT, "time_ns": 0}
    return Event("llama", 2, packed_keys=keys, **of | named)


def stored(*blocks: int, parents: list[int | None], residency: int = 1, **fields: Any) -> Event:
    return event(
        EventType.STORED,
        *blocks,
        packed_parents=b"".join(ROOT if parent is None else KEYS[parent] for parent in parents),
        packed_parent_hashes=b"".join(bytes(8) if parent is None else numbers(parent) for parent in parents),
        residency=bytes([residency]) * len(blocks),
        priorities=bytes([35]) * len(blocks),
        **fields,
    )


def updated(block: int, residency: int, priority: int = 35, **fields: Any) -> Event:
    return event(EventType.UPDATED, block, residency=bytes([residency]), priorities=bytes([priority]), **fields)


def told(*items: WatchItem) -> list[dict[str, Any]]:
    """All that TensorRT-LLM's events say of these items, through JSON."""
    show = trtllm_lines()
    return [json.loads(line) for item in items for line in show(item)]


def test_the_rank_is_in_every_event_where_there_is_one() -> None:
    show = trtllm_lines(3)
    events = [json.loads(line) for item in (stored(0, parents=[None]), updated(0, 2)) for line in show(item)]
    assert [each["attention_dp_rank"] for each in events] == [3, 3]
    assert all("attention_dp_rank" not in each for each in told(stored(0, parents=[None])))


def data(*items: WatchItem) -> list[dict[str, Any]]:
    return [each["data"] for each in told(*items)]


def block_json(number: int, **fields: Any) -> dict[str, Any]:
    plain = {
        "type": "stored_block",
        "block_hash": number,
        "tokens": [],
        "cache_level": 0,
        "priority": 35,
        "mm_keys": [],
    }
    return plain | fields


def diff(old: int | None, new: int) -> dict[str, Any]:
    return {"type": "event_diff", "new_value": new, "old_value": old}


def test_several_chains_of_one_event_are_cut_up() -> None:
    assert [
        (each["parent_hash"], [block["block_hash"] for block in each["blocks"]])
        for each in data(stored(0, 1, 2, 3, parents=[None, 0, 0, None]))
    ] == [(None, NUMBERS[:2]), (NUMBERS[0], [NUMBERS[2]]), (None, [NUMBERS[3]])]


def test_tokens_extra_ids_items_and_salt() -> None:
    (only,) = data(stored(0, parents=[None], tokens=(TOKENS,)))
    assert only["blocks"] == [
        block_json(
            NUMBERS[0],
            tokens=[
                {"type": "unique_token", "token_id": 1, "token_extra_id": 0},
                {"type": "unique_token", "token_id": 2860, "token_extra_id": 7},
            ],
            mm_keys=[{"type": "mm_key", "hash": "aa" * 32, "start_offset": 3}],
            cache_salt="tenant",
        )
    ]


def test_a_partial_block_has_fewer_tokens() -> None:
    (only,) = data(stored(0, 1, parents=[None, 0], tokens=(BlockTokens((1, 2)), BlockTokens((3,)))))
    assert [[token["token_id"] for token in block["tokens"]] for block in only["blocks"]] == [[1, 2], [3]]


def test_digests_are_shown_in_hex() -> None:
    digest = bytes(range(32))
    named: dict[str, Any] = {"event_hash": "v2_sha256", "packed_hashes": digest, "packed_parent_hashes": bytes(32)}
    (only,) = told(replace(stored(0, parents=[None]), **named))
    assert (only["hash_algo"], only["data"]["blocks"][0]["block_hash"]) == ("v2_sha256", digest.hex())


def test_a_cache_without_event_hash_has_its_keys() -> None:
    plain: dict[str, Any] = {"event_hash": "", "packed_hashes": b"", "packed_parent_hashes": b""}
    (only,) = told(replace(stored(1, parents=[0]), **plain))
    assert (only["hash_algo"], only["window_size"]) == ("kvtier_key", WHOLE_WINDOW)
    assert only["data"]["parent_hash"] == KEYS[0].hex()
    assert only["data"]["blocks"][0]["block_hash"] == KEYS[1].hex()


def test_blocks_without_a_hash_are_left_out() -> None:
    bare = replace(stored(0, 1, parents=[None, 0]), packed_hashes=bytes(8) + numbers(1), packed_parent_hashes=bytes(16))
    gone = event(EventType.REMOVED, 1, 0, packed_hashes=numbers(1) + bytes(8))
    assert data(bare, gone, event(EventType.REMOVED, 0, packed_hashes=bytes(8))) == [
        {"type": "stored", "parent_hash": None, "blocks": [block_json(NUMBERS[1])]},
        {"type": "removed", "block_hashes": [NUMBERS[1]]},
    ]


def test_priorities_have_old_and_new_values() -> None:
    assert data(stored(0, parents=[None]), updated(0, 1, 80), updated(0, 2, 80))[1:] == [
        {"type": "updated", "block_hash": NUMBERS[0], "cache_level": None, "priority": diff(35, 80)},
        {"type": "updated", "block_hash": NUMBERS[0], "cache_level": diff(0, 1), "priority": None},
    ]


def test_a_block_never_told_of_has_the_level_that_it_moved_from() -> None:
    down = updated(0, 2, moved_from=Tier.DEVICE, moved_to=Tier.HOST)
    copied = updated(1, 3, moved_from=Tier.DEVICE, moved_to=Tier.HOST)
    assert data(down, copied) == [
        {"type": "updated", "block_hash": NUMBERS[0], "cache_level": diff(0, 1), "priority": None}
    ]


def part(*blocks: int, residency: int = 2) -> SnapshotSlice:
    event = stored(*blocks, parents=[None, *blocks[:-1]], residency=residency)
    return SnapshotSlice(
        event.cache,
        event.group,
        event.packed_keys,
        event.packed_parents,
        event.residency,
        event.priorities,
        event.event_hash,
        event.packed_hashes,
        event.packed_parent_hashes,
    )


def test_a_snapshot_is_stored_and_what_events_repeat_of_it_is_not_told_again() -> None:
    said = data(
        SnapshotStart(), part(0, 1), stored(1, parents=[0], residency=2), updated(0, 1), SnapshotEnd(Cursor(1, 9))
    )
    assert said == [
        {
            "type": "stored",
            "parent_hash": None,
            "blocks": [block_json(NUMBERS[0], cache_level=1), block_json(NUMBERS[1], cache_level=1)],
        },
        {"type": "updated", "block_hash": NUMBERS[0], "cache_level": diff(1, 0), "priority": None},
    ]


def test_ids_count_from_zero_and_show_what_was_lost() -> None:
    items: list[WatchItem] = [part(0), Heartbeat(Cursor(1, 50)), part(1), Gap(1, 60, 64, "slow"), part(2)]
    assert [each["event_id"] for each in told(*items)] == [0, 1, 7]


def test_each_window_group_has_blocks_of_its_own() -> None:
    events = TrtllmEvents()
    other = replace(stored(0, parents=[None]), group=0, window_tokens=0)
    said = [each for item in (stored(0, parents=[None]), other) for each in events.of(item)]
    assert [(each["layer_group_id"], each["data"]["type"]) for each in said] == [(2, "stored"), (0, "stored")]


class Router:
    """Level and priority of each block, and what must be so of every event."""

    def __init__(self) -> None:
        self.known: dict[int, tuple[int, int]] = {}
        self.next_id = 0

    def apply(self, events: Iterable[dict[str, Any]]) -> None:
        for each in events:
            assert each["event_id"] == self.next_id
            self.next_id += 1
            self._apply(json.loads(json.dumps(each["data"])))

    def _apply(self, body: dict[str, Any]) -> None:
        match body["type"]:
            case "stored":
                assert body["parent_hash"] is None or body["parent_hash"] in self.known
                for block in body["blocks"]:
                    assert block["block_hash"] not in self.known
                    self.known[block["block_hash"]] = block["cache_level"], block["priority"]
            case "updated":
                level, priority = self.known[body["block_hash"]]
                assert body["cache_level"] or body["priority"], "an update of nothing"
                for name, old in (("cache_level", level), ("priority", priority)):
                    assert body[name] is None or (body[name]["old_value"] == old != body[name]["new_value"])
                self.known[body["block_hash"]] = (
                    body["cache_level"]["new_value"] if body["cache_level"] else level,
                    body["priority"]["new_value"] if body["priority"] else priority,
                )
            case "removed":
                for each in body["block_hashes"]:
                    del self.known[each]


BLOCKS = st.integers(0, len(KEYS) - 1)
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("store"), BLOCKS, BLOCKS, st.integers(1, 7)),
        st.tuples(st.just("update"), BLOCKS, st.integers(1, 7), st.integers(0, 100)),
        st.tuples(st.just("remove"), BLOCKS),
        st.tuples(st.just("clear")),
        st.tuples(st.just("begin anew")),
    ),
    max_size=40,
)


@given(ACTIONS)
@settings(max_examples=300)
def test_a_router_knows_the_fastest_level_and_the_priority_of_each_block(actions: list[tuple[Any, ...]]) -> None:
    """Old values are those that it knew, stored is what it did not know, and removed what it did."""
    events, router = TrtllmEvents(), Router()
    there: dict[int, tuple[int, int]] = {}
    for verb, *arguments in actions:
        match verb:
            case "store":
                block, above, residency = arguments
                parent = above if above in there and above != block else None
                there[block] = residency, 35
                router.apply(events.of(stored(block, parents=[parent], residency=residency)))
            case "update" if arguments[0] in there:
                block, residency, priority = arguments
                there[block] = residency, priority
                router.apply(events.of(updated(block, residency, priority)))
            case "remove" if arguments[0] in there:
                del there[arguments[0]]
                router.apply(events.of(event(EventType.REMOVED, arguments[0])))
            case "clear":
                there.clear()
                router.apply(events.of(event(EventType.CLEARED)))
            case "begin anew":
                router.apply(events.of(SnapshotStart()))
                for block, (residency, priority) in there.items():
                    again = stored(block, parents=[None], residency=residency)
                    router.apply(events.of(replace(again, priorities=bytes([priority]))))
        assert router.known == {
            NUMBERS[block]: ((residency & -residency).bit_length() - 1, priority)
            for block, (residency, priority) in there.items()
        }
