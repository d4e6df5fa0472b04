"""A broken connection ends nothing; a process that is gone ends everything it held."""

import pytest

from kvtierd.core import conversations
from kvtierd.core.ids import SessionId
from tests.unit.core.bench import ALICE, BOB, DEVICE, HOST, Bench, key


def test_what_a_dead_session_gives_back_goes_to_who_waits() -> None:
    bench = Bench(device=2, host=1)
    bench.blank(DEVICE, 1)
    bench.put("a")
    waiting = bench.reserve(DEVICE, 1, BOB)
    assert not bench.answered(waiting)
    bench.end()
    assert waiting in bench.grants


def test_an_orphans_requests_are_withdrawn_without_an_answer() -> None:
    bench = Bench(device=2, host=2)
    bench.put("a", HOST)
    bench.put("x")
    bench.put("y")
    reserve = bench.reserve(DEVICE, 1)
    (acquire,) = bench.acquire("a")
    move = bench.move("a", DEVICE)
    bench.orphan()
    bench.land()
    assert not any(bench.answered(ticket) for ticket in (reserve, acquire, move))
    assert bench.tier(DEVICE).held == 0


def test_a_release_frees_the_tail_first() -> None:
    """The waiting one gets the slot that was released first, which is the tail's."""
    bench = Bench(device=3)
    lease = bench.store("abc")
    tail = bench.slot("c", DEVICE)
    bench.release(lease)
    assert bench.blank(DEVICE, 1).slots == (tail,)


def test_a_session_forgets_its_own_oldest_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversations, "MOST_A_SESSION", 3)
    monkeypatch.setattr(conversations, "MOST", 5)
    bench = Bench(host=1)
    bench.put("a", HOST)
    known = bench.core.conversations

    def left_after(session: SessionId, told: str, now: int = 0) -> str:
        for tag in told:
            known.reach(session, tag.encode(), key("a"), now)
        return "astray" if known.astray else "".join(tag for tag in "1234bcxy" if known.tip(tag.encode()))

    assert left_after(BOB, "b") == "b"
    assert left_after(ALICE, "12314") == "134b", "the one told of least recently goes"
    assert left_after(SessionId(3), "xy") == "14bxy", "the cache has too many, and ALICE the most"
    bench.end(ALICE)
    assert left_after(BOB, "1c") == "14cxy", "nobody's until another session tells of it"
    assert left_after(BOB, "cccc", 2 * conversations.IDLE_NS) == "c", "the others are idle"
