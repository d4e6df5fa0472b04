"""Engines on two hosts with one store: the one loads what the other has computed, and waits for no store for long."""

import gc
import socket
import time
from contextlib import contextmanager

import pytest

from kvtier import BlockResult, Client
from tests.engine.toy import PLAIN, TOKENS, Run, engine, wait_until
from tests.integration.test_engine import HYBRID, LAYOUTS, OTHER, PROMPT, warm
from tests.integration.test_lmcache import KEYS, OBJECTS, PIECES, SIZES, Adapter

SOON_S = 5.0
"""So much longer may a busy machine take."""


class Store:
    def __init__(self, path):
        self._path = path
        self.url = f"file://{path}"
        path.mkdir()

    def wait_for(self, blocks):
        wait_until(lambda: len([each for each in self._path.rglob("*") if each.is_file()]) >= blocks)


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "store")


@pytest.fixture
def host(start_fresh, store):
    """Starts a daemon with nothing but the store in common with the others."""

    def start(write="through"):
        return start_fresh("--remote", f'{{"url": "{store.url}", "write": "{write}"}}', host=4096, disk=4096)

    return start


@pytest.fixture
def computed(host, store):
    """Has an engine on a host of its own compute prompts."""

    def compute(*prompts, layout=PLAIN):
        with engine(host().address, layout) as toy:
            for tokens in prompts:
                toy.run(tokens)
            toy.settle()
            chains = [toy.chain(tokens) for tokens in prompts]
        store.wait_for(len({chain.key(at) for chain in chains for at in range(len(chain))}))

    return compute


@contextmanager
def hanging(monkeypatch):
    """A store that takes every connection and answers none."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.getsockname()[1]}")
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.setenv(name, "test")
        monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
        yield "s3://blocks/kvtier"


def request(toy, name, tokens):
    return Run(name, toy.chain(tokens), len(tokens))


def held(daemon):
    with Client(daemon.address) as client:
        return sum(lease.held_blocks for lease in client.leases())


def asked(daemon, chain):
    """How many blocks of a chain the store was asked for."""
    with Client(daemon.address) as client:
        told = [client.explain(chain.key(at)).remote for at in range(len(chain))]
        return sum(each.there is not None for remote in told for each in remote)


@LAYOUTS
@pytest.mark.parametrize("settings", [{}, {"pin": True, "pin_wait": 5}], ids=["", "pinned"])
def test_another_host_goes_on_where_an_engine_ended(host, computed, layout, settings):
    computed(PROMPT, layout=layout)
    daemon = host()
    with engine(daemon.address, layout, **settings) as toy:
        run = request(toy, "first", PROMPT)
        assert toy.planner.offer(run.name, run.chain, 0, total_tokens=run.tokens) is None
        toy.planner.aborted(run.name)
        run = toy.run(PROMPT)
        assert (run.loaded, run.computed, run.failed) == (10, 0, 0)
        assert toy.run([*PROMPT[:-1], *range(20)]).loaded == 10
        wait_until(lambda: held(daemon) == 0)


def test_blocks_that_came_stay_until_they_are_loaded(host, computed):
    computed(PROMPT)
    daemon = host()
    with engine(daemon.address) as toy:
        waiting = request(toy, "waiting", PROMPT)
        assert [toy.offered(waiting) for _ in range(3)] == [10 * TOKENS] * 3
        wait_until(lambda: held(daemon) == 10)
        toy.planner.aborted(waiting.name)
        wait_until(lambda: held(daemon) == 0)
    daemon = host()
    with engine(daemon.address) as toy, Client(daemon.address) as client:
        cache = client.open_cache(toy.planner.leader.name)
        run = toy.begin(PROMPT)
        assert cache.drop([run.chain.key(4)]).results == [BlockResult.HELD]
        toy.complete(run)
        assert run.failed == 0
        wait_until(lambda: held(daemon) == 0)
        toy.end(run)
        assert toy.planner.stats()["blocks fetched from the store"] == 10


@pytest.mark.parametrize("way", ["aborted", "finished", "preempted"])
def test_a_request_that_ends_while_it_waits_holds_nothing(host, computed, way):
    computed(PROMPT)
    daemon = host()
    with engine(daemon.address) as toy:
        for number in range(20):
            run = request(toy, f"x{number}", PROMPT)
            toy.planner.offer(run.name, run.chain, 0, total_tokens=run.tokens)
            getattr(toy.planner, way)(run.name)
        assert toy.run(PROMPT).loaded == 10
        wait_until(lambda: held(daemon) == 0)


def test_half_of_a_hybrid_comes_from_the_store(host, computed):
    computed(PROMPT, layout=HYBRID)
    daemon = host()
    with engine(daemon.address, HYBRID) as toy, Client(daemon.address) as client:
        toy.run(PROMPT)
        chain = toy.chain(PROMPT)
        keys = [chain.key(at) for at in range(10)]
        blocks = client.open_cache(toy.planner.leader.name).in_group(0).get(keys)
    daemon = host()
    with engine(daemon.address, HYBRID) as toy, Client(daemon.address) as client:
        toy.settle()
        client.open_cache(toy.planner.leader.name).in_group(0).put(keys, blocks)
        assert toy.run(PROMPT).loaded == 10


def test_an_engine_that_cannot_ask_again_finds_the_blocks_the_next_time(host, computed):
    computed(PROMPT)
    with engine(host().address) as toy:

        def offered(name):
            run = request(toy, name, PROMPT)
            return toy.planner.offer(run.name, run.chain, 0, total_tokens=run.tokens, waits=False)

        assert offered("first") == 0
        wait_until(lambda: offered("next") == 10 * TOKENS)


def test_a_store_that_need_not_be_asked_is_not(host, computed):
    computed(PROMPT)
    daemon = host(write="evict")  # before it writes a block it asks whether that is there
    with engine(daemon.address, remote_wait=0) as toy:
        assert toy.run(PROMPT).loaded == 0
    with engine(daemon.address, min_blocks=11) as toy:
        run = request(toy, "short", PROMPT[:-1])
        assert toy.planner.offer(run.name, run.chain, 0, total_tokens=run.tokens) == 0
        assert asked(daemon, toy.chain(PROMPT)) == 0


def test_what_costs_more_than_to_compute_stays_in_the_store(host, computed):
    computed(PROMPT, OTHER)
    with engine(host().address, recompute_seconds_per_block=1e-9) as toy:
        assert toy.run(PROMPT).loaded == 10  # nothing has been measured yet
        assert toy.run(OTHER).loaded == 0
        toy.run([3] * len(OTHER))
        counts = toy.planner.stats
        wait_until(lambda: "not fetched: to recompute is cheaper" in counts())
        wait_until(lambda: "not fetched: the store has no more" in counts())


def test_a_store_that_hangs_costs_a_request_its_wait_and_the_scheduler_nothing(start_fresh, monkeypatch):
    with hanging(monkeypatch) as url:
        daemon = start_fresh("--remote", f'{{"url": "{url}"}}', host=4096, disk=4096)
        with warm(daemon.address, remote_wait=0.5) as toy:
            longer = [*PROMPT, *range(4 * TOKENS)]
            runs = [request(toy, f"x{number}", [*longer, number]) for number in range(100)]
            started = time.monotonic()
            for run in runs:
                assert toy.planner.offer(run.name, run.chain, 0, total_tokens=run.tokens) is None
            assert [toy.offered(run) for run in runs] == [10 * TOKENS] * len(runs)
            assert time.monotonic() - started < 0.5 + SOON_S, "a wait for each request"
            assert toy.pending > 0, "an offer waited"
            assert toy.planner.stats()["not fetched in time"] >= 1
            for run in runs:
                toy.planner.aborted(run.name)
            wait_until(lambda: held(daemon) == 0)


@pytest.mark.parametrize("waits", [True, False])
def test_an_engine_that_ends_meanwhile_leaves_nothing(host, waits, caplog):
    daemon = host()
    for number in range(20):
        with engine(daemon.address) as toy:
            run = request(toy, "x", [number, *PROMPT])
            toy.planner.offer(run.name, run.chain, 0, total_tokens=run.tokens, waits=waits)
    gc.collect()
    assert "never retrieved" not in caplog.text
    wait_until(lambda: held(daemon) == 0)


def test_a_daemon_that_stops_costs_a_request_its_wait(host):
    daemon = host()
    with warm(daemon.address, remote_wait=0.5) as toy, daemon.paused():
        started = time.monotonic()
        for number in range(5):
            assert toy.run([*PROMPT, *[number] * TOKENS]).loaded == 10
        assert time.monotonic() - started < 5 * 0.5 + SOON_S
        assert toy.pending > 0, "an offer waited"


def test_objects_of_lmcache_come_from_the_store(host, store, ending):
    def adapt():
        adapter = Adapter(host().address)
        ending.callback(adapter.connector.close)
        return adapter

    # On a busy machine a daemon may seem to be away.
    first = adapt()
    wait_until(lambda: first.store()[0])
    store.wait_for(PIECES)
    other = adapt()
    wait_until(lambda: other.exists(KEYS[:1]) == (True, [True]))

    def loaded():
        results, buffers = other.load(KEYS, SIZES)
        return all(results) and [bytes(each) for each in buffers] == OBJECTS

    wait_until(loaded)
