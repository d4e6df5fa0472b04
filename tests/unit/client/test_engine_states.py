"""The states that a cache keeps of chats: those to which a later prompt returns."""

from kvtier.engine.states import KeptStates

SYSTEM, P1, A1, P2, A2, P3, P4 = (name.encode() for name in ("system", "p1", "a1", "p2", "a2", "p3", "p4"))


def prompt(states: KeptStates, key: bytes, before: bytes | None) -> list[bytes]:
    return states.add_prompt(key, before, branch=False)


def test_a_chat_keeps_its_last_turn_and_the_state_before_it() -> None:
    states = KeptStates()
    assert prompt(states, P1, None) == []
    assert prompt(states, P2, P1) == []
    assert prompt(states, P3, P2) == [P1]
    assert prompt(states, P4, P3) == [P2]


def test_a_chat_that_goes_on_after_its_answers() -> None:
    states = KeptStates()
    prompt(states, P1, None)
    assert states.add_answer(A1, P1, None) == []
    assert prompt(states, P2, A1) == [P1]
    assert states.add_answer(A2, P2, None) == []
    assert prompt(states, P3, A2) == [P2, A1]


def test_a_chat_that_leaves_out_parts_of_its_answers() -> None:
    """As a template does that takes out the model's thoughts."""
    states = KeptStates()
    prompt(states, P1, None)
    states.add_answer(A1, P1, None)
    assert prompt(states, P2, P1) == [A1]
    states.add_answer(A2, P2, None)
    assert prompt(states, P3, P2) == [A2, P1]


def test_of_an_answer_the_last_state_is_kept() -> None:
    states = KeptStates()
    prompt(states, P1, None)
    assert states.add_answer(A1, P1, None) == []
    assert states.add_answer(A2, P1, A1) == [A1]
    assert states.add_answer(b"first block", None, None) == []
    assert states.add_answer(b"second block", None, b"first block") == [b"first block"]


def test_branches_are_kept() -> None:
    states = KeptStates()
    states.add_prompt(SYSTEM, None, branch=True)
    prompt(states, P1, SYSTEM)
    prompt(states, P2, P1)
    assert prompt(states, P3, P2) == [P1], "not the state before, which other chats share"
    assert prompt(states, b"other", P2) == [], "from now on a branch"
    assert prompt(states, P4, P3) == []


def test_chats_after_one_short_prompt_keep_their_answers() -> None:
    states = KeptStates()
    prompt(states, SYSTEM, None)
    states.add_answer(A1, SYSTEM, None)
    states.add_answer(A2, SYSTEM, None)
    assert prompt(states, P1, A1) == []
    assert prompt(states, P2, A2) == []
    assert prompt(states, P3, SYSTEM) == []


def test_states_that_others_have_stored_are_left_alone() -> None:
    states = KeptStates()
    assert prompt(states, P3, P2) == []
    assert prompt(states, P4, P3) == []
    assert states.add_answer(A2, P2, A1) == []
