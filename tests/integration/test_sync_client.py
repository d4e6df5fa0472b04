"""The synchronous client against a real daemon: verbs, threads, interrupts, ends, forks, and no event loop anywhere."""

import gc
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from kvtier import Client, Event, errors
from kvtier.types import BlockResult, EventType, Tier
from tests.engine.toy import wait_until
from tests.forking import in_child
from tests.integration.blocks import SPEC, assert_bytes, block, blocks, chain, sizes
from tests.integration.touching import bytes_in, write_into
from tests.integration.waiting import PATIENCE_S

EXAMPLE = Path(__file__).parents[2] / "examples" / "quickstart_sync.py"


@pytest.fixture
def calls(daemon):
    with Client(daemon.address) as client:
        yield client


@pytest.fixture
def cache(calls, name):
    return calls.open_cache(name, SPEC, budgets=sizes(device=8, host=8))


def held(client):
    """Slots that this client holds, as the daemon sees it."""
    return next(each.held_slots for each in client.stats().sessions if each.session_id == client.session_id)


def test_every_verb(calls, cache):
    keys = chain("verbs", 4)
    with calls.watch(oldest=True, caches=[cache.name]) as watch:
        assert cache.put(keys, blocks(keys)) == [BlockResult.OK] * 4
        assert cache.match([*keys, *chain("else", 1)]).blocks == 4
        assert_bytes(keys, cache.get(keys))
        assert [place.residency for place in cache.locate(keys)] == [Tier.DEVICE.bit] * 4
        assert cache.move(keys[3:], Tier.HOST) == [BlockResult.OK]
        assert [found.key for found in cache.blocks()] == keys
        assert [len(page.blocks) for page in cache.pages(page_blocks=3)] == [3, 1]
        with cache.acquire(keys[:2]) as lease:
            assert (lease.blocks, lease.matched, lease.unchanged()) == (2, 2, True)
            assert np.array_equal(bytes_in(lease.view(1)), block(keys[1]))
            assert held(calls) == 2
            with cache.join(lease.ticket()) as joined:
                assert (joined.keys, joined.blocks) == (tuple(keys[:2]), 2)
        with cache.acquire_many([keys[:1], keys], min_blocks=1) as leases:
            assert [lease.blocks for lease in leases] == [1, 4]
        tail = chain("verbs", 5)[4:]
        with cache.reserve(1) as blank:
            write_into(blank.view(0), block(tail[0]))
            with cache.join(blank.ticket()) as joined:
                assert joined.commit(tail, parent=keys[3]) == [BlockResult.OK]
        assert cache.drop(tail).dropped == 1
        assert [next(watch).type for _ in range(2)] == [EventType.CREATED, EventType.STORED]
    assert calls.caches()[0].blocks >= 0
    assert held(calls) == 0


def test_ctrl_c_in_a_call_that_waits_leaves_nothing_held(daemon, calls, name):
    cache = calls.open_cache(name, SPEC, budgets=sizes(device=4))
    with daemon.paused(), pytest.raises(KeyboardInterrupt):
        # The call cannot end by itself, however late this comes; and it has been sent by then, mostly.
        threading.Timer(0.2, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)).start()
        cache.reserve(1)
    wait_until(lambda: not held(calls))
    assert cache.reserve(4).slots, "and all of it is to be had"


def test_another_thread_ends_a_watch(calls, cache):
    watch = calls.watch(caches=[cache.name])
    with ThreadPoolExecutor(1) as pool:
        following = pool.submit(list, watch)
        cache.put(chain("watched", 1), blocks(chain("watched", 1)))
        watch.close()
        assert all(isinstance(item, Event) for item in following.result(PATIENCE_S))
    watch.close()
    assert list(watch) == []


def test_closing_ends_calls_of_other_threads_and_later_ones(daemon):
    client = Client(daemon.address)
    watch = client.watch()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(next, watch)
        client.stats()
        client.close()
        with pytest.raises(errors.ClientClosed):
            waiting.result(PATIENCE_S)
    client.close()
    with pytest.raises(errors.ClientClosed):
        client.stats()


def test_a_client_never_closed_says_so_and_says_goodbye(daemon, calls):
    client = Client(daemon.address)
    session = client.session_id
    with pytest.warns(ResourceWarning, match="unclosed client"):
        del client
    wait_until(lambda: session not in {each.session_id for each in calls.stats().sessions})


def test_a_forked_child_is_refused_and_takes_nothing_from_its_parent(calls, cache):
    with cache.reserve(2) as lease:

        def child():
            calls.close()
            try:
                with lease:
                    cache.match(chain("fork", 1))
            except errors.ClientClosed as error:
                return 0 if error.reason == "FORKED" else 2
            return 3

        assert in_child(child) == 0
        assert held(calls) == 2


@pytest.mark.parametrize("closed", [False, True])
def test_a_child_forked_beside_a_client_has_none_and_may_drop_its_parents(daemon, closed):
    """Else its calls would wait for ever, and the last reference to a channel for a thread that it does not have."""
    clients = [Client(daemon.address)]
    if closed:
        clients[0].close()

    def child():
        told = ""
        try:
            Client(daemon.address)
        except errors.CallerError as error:
            told = error.reason
        clients.clear()
        gc.collect()
        return 0 if told == "FORKED" else 2

    gc.collect()  # nothing else is left of gRPC
    assert in_child(child) == 0
    if not closed:
        assert clients[0].stats().pid
        clients[0].close()


def test_a_program_that_forgets_to_close_ends_by_itself(daemon, calls):
    program = (
        "import kvtier, sys\n"
        "client = kvtier.Client(sys.argv[1])\n"
        "watch = iter(client.watch(oldest=True))\n"
        "print(client.session_id)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, daemon.address], check=False, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert int(done.stdout) not in {each.session_id for each in calls.stats().sessions}


def test_the_example_runs(daemon):
    done = subprocess.run(
        [sys.executable, EXAMPLE, daemon.address], check=False, capture_output=True, text=True, timeout=PATIENCE_S * 2
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert "get: True" in done.stdout
