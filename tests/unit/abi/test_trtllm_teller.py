"""What is told in TensorRT-LLM's words adds up, whatever happens, and no event is larger than a reader expects."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.abi.block_tokens import BlockTokens
from kvtier.abi.trtllm import BLOCK_WEIGHT, EVENT_WEIGHT, Json, TrtllmTeller

ROOT = bytes(32)


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


@dataclass(frozen=True)
class Told:
    """Of blocks by number. ``parents``: 0 = it is a root."""

    blocks: Sequence[int] = ()
    parents: Sequence[int] = ()
    residency: bytes = b""
    priorities: bytes = b""
    tokens: Sequence[BlockTokens] = ()
    group: int = 0
    event_hash: str = ""
    window_tokens: int = 0
    packed_hashes: bytes = b""
    packed_parent_hashes: bytes = b""

    @property
    def packed_keys(self) -> bytes:
        return b"".join(map(key, self.blocks))

    @property
    def packed_parents(self) -> bytes:
        return b"".join(map(key, self.parents))


def chain(first: int, count: int, tokens: int = 0) -> Told:
    """``count`` blocks, each the parent of the next."""
    return Told(
        blocks=range(first, first + count),
        parents=[0, *range(first, first + count - 1)],
        residency=b"\1" * count,
        priorities=b"\x23" * count,
        tokens=[BlockTokens((7,) * tokens)] * count if tokens else (),
    )


class Router:
    """Level and priority of each block, and what must be so of every event."""

    def __init__(self) -> None:
        self.known: dict[str, tuple[int, int]] = {}
        self.next_id = 0

    def apply(self, events: Iterable[Json]) -> None:
        for event in events:
            assert event["event_id"] == self.next_id
            self.next_id += 1
            self._apply(json.loads(json.dumps(event["data"])))

    def _apply(self, data: dict[str, Any]) -> None:
        match data["type"]:
            case "stored":
                assert data["parent_hash"] is None or data["parent_hash"] in self.known
                for block in data["blocks"]:
                    assert block["block_hash"] not in self.known
                    self.known[block["block_hash"]] = block["cache_level"], block["priority"]
            case "updated":
                level, priority = self.known[data["block_hash"]]
                assert data["cache_level"] or data["priority"], "an update of nothing"
                for name, old in (("cache_level", level), ("priority", priority)):
                    assert data[name] is None or (data[name]["old_value"] == old != data[name]["new_value"])
                self.known[data["block_hash"]] = (
                    data["cache_level"]["new_value"] if data["cache_level"] else level,
                    data["priority"]["new_value"] if data["priority"] else priority,
                )
            case "removed":
                for each in data["block_hashes"]:
                    del self.known[each]


def test_a_long_chain_comes_in_several_that_go_on_where_the_last_one_ended() -> None:
    for count, tokens in ((EVENT_WEIGHT, 0), (100, 64)):
        router, events = Router(), list(TrtllmTeller().stored(chain(1, count, tokens)))
        router.apply(events)
        sizes = [len(event["data"]["blocks"]) for event in events]
        assert sum(sizes) == count
        assert (max(sizes) - 1) * (BLOCK_WEIGHT + tokens) < EVENT_WEIGHT
        assert [event["data"]["parent_hash"] for event in events] == [
            None,
            *(event["data"]["blocks"][-1]["block_hash"] for event in events[:-1]),
        ]


def test_a_clear_of_many_comes_in_several() -> None:
    teller, router = TrtllmTeller(), Router()
    router.apply(teller.stored(chain(1, 2 * EVENT_WEIGHT + 1)))
    removed = list(teller.cleared(Told()))
    assert [len(event["data"]["block_hashes"]) for event in removed] == [EVENT_WEIGHT, EVENT_WEIGHT, 1]
    router.apply(removed)
    assert router.known == {}


BLOCKS = st.integers(1, 8)
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("store"), BLOCKS, st.integers(0, 8), st.integers(1, 7)),
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
    teller, router = TrtllmTeller(), Router()
    there: dict[int, tuple[int, int]] = {}
    for verb, *arguments in actions:
        match verb:
            case "store":
                block, above, residency = arguments
                above = above if above in there and above != block else 0
                there[block] = residency, 35
                router.apply(teller.stored(Told([block], [above], bytes([residency]), b"\x23")))
            case "update" if arguments[0] in there:
                block, residency, priority = arguments
                there[block] = residency, priority
                router.apply(teller.updated(Told([block], (), bytes([residency]), bytes([priority])), None))
            case "remove" if arguments[0] in there:
                del there[arguments[0]]
                router.apply(teller.removed(Told([arguments[0]])))
            case "clear":
                there.clear()
                router.apply(teller.cleared(Told()))
            case "begin anew":
                router.apply(teller.begin())
                for block, (residency, priority) in there.items():
                    router.apply(teller.stored(Told([block], [0], bytes([residency]), bytes([priority]))))
        fastest = {
            key(block).hex(): ((residency & -residency).bit_length() - 1, priority)
            for block, (residency, priority) in there.items()
        }
        assert router.known == fastest
