"""docs/events.md names every type, cause and reason that the wire and the daemon have, and no other."""

import re
from pathlib import Path

from kvtier.types import Cause, EventType
from kvtier.v1 import common_pb2, events_pb2
from tests.events_page import names, table, told

ROOT = Path(__file__).parents[3]


def on_the_wire(prefix, keys):
    return [key.removeprefix(prefix).lower() for key in keys if not key.endswith("_UNSPECIFIED")]


def test_every_type_is_told_of():
    types = [names(row[0])[0] for row in table("type")]
    assert types == on_the_wire("EVENT_TYPE_", events_pb2.EventType.keys()) == [str(each) for each in EventType]


def test_every_cause_is_told_of_with_types_that_there_are():
    causes = [names(row[0])[0] for row in table("cause")]
    assert causes == on_the_wire("CAUSE_", common_pb2.Cause.keys()) == [str(each) for each in Cause]
    assert {kind for kind, _ in told()} == {str(each) for each in EventType}
    assert all(len(row) == 4 for row in table("cause"))


def test_every_reason_of_a_gap_is_told_of():
    told_of = {names(row[0])[0] for row in table("reason")}
    comment = (ROOT / "proto/kvtier/v1/events.proto").read_text().partition("message Gap {")[2].partition("}")[0]
    own = {"lost-state", "unexplained"}
    assert told_of == {*re.findall(r'"([a-z-]+)"', comment), *own}, "the last two are the client's own"
