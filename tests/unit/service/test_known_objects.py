"""What is known of a store's objects, by a clock of the test's own."""

from kvtierd.service.remote.sources import ABSENT_S, THERE_S, Known


def test_knowledge_ends():
    now = 0.0
    known = Known(lambda: now)
    known.note(["a"], there=True)
    known.note(["b"], there=False)
    assert (known.of("a"), known.of("b"), known.of("c")) == (True, False, None)
    now = ABSENT_S
    assert (known.of("a"), known.of("b")) == (True, None)
    now = THERE_S
    assert known.of("a") is None


def test_the_oldest_goes_first():
    known = Known(lambda: 0.0, most=2)
    known.note(["a", "b"], there=True)
    known.note(["a"], there=True)
    known.note(["c"], there=True)
    assert [known.of(name) for name in "abc"] == [True, None, True]
    assert len(known._until) == 2
