"""What is said of one block: where its copies are, and what holds them."""

import hashlib
import tracemalloc

from kvtierd.core.block import Block, Phase, Use
from kvtierd.core.conversations import MOST_A_SESSION, Conversations
from kvtierd.core.events import CAPACITY
from kvtierd.core.explain import BlockNow, CopyNow
from kvtierd.core.ids import Key, SessionId, Tier, Traits
from kvtierd.core.index import REMEMBERED, BlockIndex, Departed
from kvtierd.service.validation import conversation
from tests.unit.core.bench import DEVICE, GROUP, HOST, Bench, key


def explained(bench: Bench, name: str) -> BlockNow:
    found = bench.core.explain(GROUP, key(name))
    assert found is not None
    return found


def at(bench: Bench, name: str, tier: Tier = DEVICE) -> CopyNow:
    return next(copy for copy in explained(bench, name).copies if copy.tier is tier)


def test_a_copy_under_way_is_seen_at_both_ends() -> None:
    bench = Bench(device=1, host=1)
    bench.put("a", HOST)
    bench.move("a", DEVICE)
    assert at(bench, "a").phase is Phase.FILLING
    assert (at(bench, "a", HOST).phase, at(bench, "a", HOST).readers) == (Phase.READY, 1)


def test_a_victim_on_its_way_down_says_so() -> None:
    bench = Bench(device=1, host=1)
    bench.put("a")
    bench.reserve(DEVICE, 1)
    assert at(bench, "a").phase is Phase.LEAVING


def test_a_conversation_takes_at_most_200_bytes() -> None:
    index = BlockIndex()
    for number in range(MOST_A_SESSION):
        index.add(Block(Key(b"%032d" % number), None, None, Traits(35)))
    tracemalloc.start()
    known = Conversations(index, lambda *_: None)
    for number, block in enumerate(index):
        known.reach(SessionId(1), conversation("tag", b"%0128d" % number), block.key, 1)
    taken = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert known.tip(conversation("tag", b"%0128d" % 0)) is not None
    assert taken <= 200 * len(index)


def test_departed_blocks_are_remembered_in_bounded_memory() -> None:
    """Four blocks of the same last use leave in each call."""
    tracemalloc.start()
    departed, keys = Departed(10), [Key(hashlib.sha256(b"%d" % n).digest()) for n in range(100_000)]
    before = tracemalloc.get_traced_memory()[0]
    for first in range(0, len(keys), 4):
        use = Use(1, 0, (1 << 59) + first)
        for each in keys[first : first + 4]:
            block = Block(each, None, None, Traits(35))
            block.use = use
            departed.add(block, CAPACITY, SessionId(1 << 40))
        departed.stamp((1 << 60) + first)
    taken = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    known = [left for key in keys if (left := departed.get(key)) is not None]
    *departure, used = known[-1]
    assert departure == [(1 << 60) + 99_996, CAPACITY, 1 << 40]
    assert used is not None
    assert used.at == (1 << 59) + 99_996
    assert REMEMBERED // 2 < len(known) <= REMEMBERED + 10
    assert taken <= 150 * len(known)
