"""The hints that come with an engine's request."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier import Hint
from kvtier.engine.request import MOST, RequestHints

KEYS = bytes(range(32))


def outcomes(found):
    return [each["outcome"] for each in found.outcomes]


def test_hints_of_a_conversation_are_told_after_where_it_is():
    found = RequestHints.of({"kvtier": {"session": "agent", "hints": [{"action": "end", "tokens": [32, 64]}]}})
    assert found.told(KEYS) == [Hint("reached", b"agent", KEYS), Hint("end", b"agent", tokens=(32, 64))]
    assert found.reply == {"kvtier": {"hints": [{"action": "end", "outcome": "deferred"}]}}


def test_hints_without_a_conversation_are_about_the_request():
    found = RequestHints.of({"kvtier": {"hints": [{"action": "demote", "tier": "disk"}]}})
    assert found.told(KEYS) == [Hint("demote", keys=KEYS, tier="disk")]


def test_an_engines_own_session_is_a_conversation():
    assert RequestHints.of(None, session="s").told(KEYS) == [Hint("reached", b"s", KEYS)]
    assert RequestHints.of(None).told(KEYS) == []
    assert RequestHints.of({"do_remote_prefill": True}).reply is None


@pytest.mark.parametrize(
    ("hint", "reason"),
    [
        ({"action": "explode"}, "action = explode"),
        ({}, "action"),
        ({"action": "end", "color": 7}, "hint.color"),
        ({"action": "end", "tokens": [4, 2]}, "tokens"),
        ({"action": "end", "tokens": "ab"}, "tokens"),
        ({"action": "pin", "tier": "tape"}, "tier"),
        ({"action": "retain", "priority": "high"}, "priority"),
        ({"action": "return", "for_s": -2}, "for_s"),
        ({"action": "end", "conversation": 129 * "c"}, "conversation"),
        ({"action": "end", "keys": "00"}, "keys"),
        (7, "hint"),
    ],
)
def test_a_malformed_hint_is_rejected_alone(hint, reason):
    found = RequestHints.of({"kvtier": {"hints": [hint, {"action": "end"}]}})
    assert outcomes(found) == ["rejected", "deferred"]
    assert reason in found.outcomes[0]["reason"]


def test_a_request_has_a_bounded_number_of_hints():
    found = RequestHints.of({"kvtier": {"hints": [{"action": "end"}] * (MOST + 5)}})
    assert outcomes(found) == ["deferred"] * MOST + ["rejected"]


json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
names = ("tokens", "tier", "priority", "for_s", "conversation", "keys")
fields = st.fixed_dictionaries(
    {"action": st.sampled_from(["end", "retain", "pin"]) | json}, optional=dict.fromkeys(names, json)
)
given_hints = st.fixed_dictionaries({}, optional={"session": json, "hints": json | st.lists(fields | json, max_size=4)})
action = st.builds(SimpleNamespace, action_id=json, action_type=json, action_version=json, payload=fields | json)


@given(st.fixed_dictionaries({}, optional={"kvtier": json | given_hints}), st.lists(action, max_size=3), json)
def test_no_field_of_a_request_raises(parameters, actions, session):
    found = RequestHints.of(parameters, actions, session)
    assert set(outcomes(found)) <= {"deferred", "rejected"}
    for hint in found.told(KEYS):
        hint.message()
