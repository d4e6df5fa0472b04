"""The lines of a connector's log: below the engine's own loggers, at the start and when the daemon goes or comes."""

import logging

import pytest

from kvtier import Cause, Client
from kvtier.connectors.store import Store
from kvtier.engine import EngineOptions
from kvtier.engine import client as engine_log
from kvtier.explanation import why_gone
from tests.engine.toy import PLAIN, TOKENS, engine, wait_until
from tests.integration.blocks import SPEC
from tests.integration.conftest import own_daemon

daemon = own_daemon(host=4096, disk=4096)


@pytest.fixture
def lines():
    """Lines of an engine that configures its own logger only, as vLLM does, by the names of their loggers."""
    found: list[tuple[str, str]] = []

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append((record.name, record.getMessage()))

    theirs, ours, handler = logging.getLogger("an-engine"), logging.getLogger("kvtier"), Lines()
    before = ours.handlers[:], ours.propagate, ours.level
    engine_log.below("an-engine")  # the connector may be imported before the engine configures its logger
    theirs.addHandler(handler)
    theirs.setLevel(logging.INFO)
    theirs.propagate = False
    yield found
    theirs.removeHandler(handler)
    ours.handlers[:], ours.propagate = before[:2]
    ours.setLevel(before[2])


def test_a_line_at_the_start_one_for_a_loss_and_one_for_the_return(daemon, lines):
    with engine(daemon.address, PLAIN, host_bytes=1 << 20, disk_bytes=2 << 20) as toy:
        name = toy.planner.leader.name
        (start,) = [line for line in lines if "cache" in line[1]]
        assert start == (
            "an-engine.kvtier.engine",
            f"kvtier: cache {name}, 1020.0 KiB host, 2.0 MiB disk, daemon at {daemon.address}",
        )
        daemon.kill()
        wait_until(lambda: len(lines) == 2)
        assert f"the engine runs without kvtier's cache {name}: the daemon does not answer" in lines[1][1]
        daemon.start()
        wait_until(lambda: len(lines) == 3)
        assert lines[2][1] == f"kvtier's cache {name} is back"


def test_an_engine_with_a_store_of_its_own_keys_says_the_same(daemon, lines):
    store = Store(EngineOptions.of({"address": daemon.address}), SPEC, weights="commit abc")
    assert lines[0][1].startswith(f"kvtier: cache {store.name}, ") and lines[0][1].endswith(", weights by commit abc")
    store.close()


def test_misses_are_explained_in_a_line_each(daemon, lines, monkeypatch):
    monkeypatch.setattr("kvtier.engine.leader._EXPLAIN_S", 0.0)
    with engine(daemon.address, PLAIN, host_bytes=1 << 20, explain_misses=1.0) as toy, Client(daemon.address) as client:
        name, prompt = toy.planner.leader.name, list(range(4 * TOKENS + 1))

        def explained():
            return [line for _, line in lines if line.startswith("request ")]

        def begun():
            lines.clear()
            return toy.begin(prompt)

        def ended(run):
            toy.complete(run)
            toy.end(run)
            toy.settle()

        first = begun()
        wait_until(explained)
        assert toy.offered(first) == 0, "the same request, which counts once"
        ended(first)
        assert explained() == [
            f"request {first.name}: block 0 of 4 is missing in {name}: "
            "It was never stored, or its past is not known to this client."
        ]
        ended(begun())
        assert explained() == [], "a hit needs no explanation"
        client.open_cache(name).drop(first.chain.key(2))
        monkeypatch.setattr("kvtier.engine.leader._EXPLAIN_S", 600.0)
        second = begun()
        wait_until(explained)
        ended(second)
        assert explained()[0].startswith(f"request {second.name}: block 2 of 4 is missing in {name}: Gone since ")
        assert explained()[0].endswith(why_gone(Cause.EXPLICIT))
        client.open_cache(name).drop(first.chain.key(2))
        ended(begun())
        assert explained() == [], "not so soon after the last"


def test_no_miss_is_explained_unless_that_is_wanted(daemon, lines):
    with engine(daemon.address, PLAIN, host_bytes=1 << 20) as toy:
        toy.run(list(range(4 * TOKENS + 1)))
        toy.settle()
    assert not [line for _, line in lines if line.startswith("request ")]
