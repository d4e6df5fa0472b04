"""LMCache's objects in blocks: the connector by itself, called as LMCache's adapter calls it, against a real daemon.

LMCache's own benchmark and server run on it in ``tests/engines/test_lmcache.py``.
"""

import os
import random
import select
from functools import partial

import pytest

from kvtier import Client, Tier
from kvtier.connectors.lmcache import KvtierL2, _key_of
from kvtier.errors import DaemonUnavailable, InvalidArgument
from tests.integration.waiting import PATIENCE_S, eventually

PIECE = 8192
SIZES = (1, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE, 5 * PIECE + 7)
KEYS = [f"model@00000001@0@{size:064x}" for size in SIZES]
OBJECTS = [bytes(os.urandom(size)) for size in SIZES]
PIECES = 1 + 1 + 1 + 2 + 3 + 6


def blocks_on_disk(daemon):
    with Client(daemon.address) as client:
        tiers = [tier for cache in client.stats().caches for tier in cache.tiers]
    return sum(tier.ready for tier in tiers if tier.tier is Tier.DISK)


class Adapter:
    """Waits for each operation on the connector's descriptor, as LMCache does."""

    def __init__(self, address, **settings):
        given = {"block_bytes": PIECE, "host_bytes": 4 << 20, "disk_bytes": 8 << 20} | settings
        self.connector = KvtierL2(address=address, **given)

    def ask(self, number):
        poller = select.poll()
        poller.register(self.connector.event_fd(), select.POLLIN)
        assert poller.poll(PATIENCE_S * 1000), "no completion"
        ((answered, good, _, results),) = self.connector.drain_completions()
        assert answered == number
        assert poller.poll(0) == [], "all is drained"
        return good, results

    def store(self, keys=KEYS, objects=OBJECTS):
        return self.ask(self.connector.submit_batch_set(keys, [memoryview(each) for each in objects]))

    def exists(self, keys=KEYS):
        return self.ask(self.connector.submit_batch_exists(keys))

    def load(self, keys=KEYS, sizes=SIZES):
        buffers = [bytearray(size) for size in sizes]
        good, results = self.ask(self.connector.submit_batch_get(keys, [memoryview(each) for each in buffers]))
        assert good
        return results, buffers

    def delete(self, keys=KEYS):
        return self.ask(self.connector.submit_batch_delete(keys))


@pytest.fixture
def lent(start_fresh):
    return start_fresh("--host-bytes", str(16 << 20), "--disk-bytes", str(64 << 20))


@pytest.fixture
def adapt(lent, ending):
    def adapt(**settings):
        adapter = Adapter(lent.address, **settings)
        ending.callback(adapter.connector.close)
        return adapter

    return adapt


def test_objects_of_any_size_come_back(adapt):
    adapter = adapt()
    assert adapter.exists() == (True, [False] * 6)
    assert adapter.store() == (True, [True] * 6)
    assert adapter.exists() == (True, [True] * 6)
    assert adapter.load() == ([True] * 6, OBJECTS)
    assert adapter.store() == (True, [True] * 6), "stored before"


def test_an_object_of_another_length_is_a_miss(adapt):
    adapter = adapt()
    adapter.store()
    results, _ = adapter.load(sizes=[size + 1 for size in SIZES])
    assert results == [False] * 6
    results, _ = adapter.load(sizes=[max(1, size // 2) for size in SIZES])
    assert results == [True, *[False] * 5], "the first one has the same length"


def test_a_deleted_object_is_gone(adapt):
    adapter = adapt()
    adapter.store()
    assert adapter.delete(KEYS[2:5]) == (True, [True] * 3)
    assert adapter.exists() == (True, [True, True, False, False, False, True])
    assert adapter.delete(KEYS[2:5]) == (True, [False] * 3)
    assert adapter.store(KEYS[2:5], OBJECTS[2:5]) == (True, [True] * 3)
    assert adapter.load() == ([True] * 6, OBJECTS)


def test_other_bytes_under_an_old_key_replace_the_old_ones(adapt):
    adapter = adapt()
    adapter.store()
    other = [bytes(os.urandom(size)) for size in SIZES]
    assert adapter.store(objects=other) == (True, [True] * 6)
    assert adapter.load() == ([True] * 6, other)
    longer = [each + b"more" * PIECE for each in other]
    assert adapter.store(objects=longer) == (True, [True] * 6)
    assert adapter.load()[0] == [False] * 6
    assert adapter.load(sizes=[len(each) for each in longer]) == ([True] * 6, longer)


def test_pieces_of_two_objects_are_no_object(adapt, lent):
    """The connectors of two servers store at once."""
    one, two = adapt(), adapt()
    one.store(KEYS[-1:], [OBJECTS[-1]])
    assert two.connector._store is not None
    two.connector._store.drop(0, [_key_of(KEYS[-1], 2), _key_of(KEYS[-1], 3)])
    other = bytes(os.urandom(SIZES[-1]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KvtierL2, "_drop_others", lambda *_: set())  # it looked before
        assert two.store(KEYS[-1:], [other]) == (True, [True])
    assert one.load(KEYS[-1:], SIZES[-1:])[0] == [False]
    assert two.store(KEYS[-1:], [other]) == (True, [True])
    assert one.load(KEYS[-1:], SIZES[-1:]) == ([True], [other])


@pytest.mark.parametrize("number", [0, 3])
def test_an_object_in_part_is_not_there_and_is_deleted_whole(adapt, number):
    adapter, other = adapt(), adapt()
    adapter.store()
    assert adapter.connector._store is not None
    adapter.connector._store.drop(0, [_key_of(KEYS[-1], number)])
    assert adapter.exists()[1] == other.exists()[1] == [*[True] * 5, False]
    assert adapter.delete(KEYS[-1:]) == (True, [True])
    assert not any(adapter.connector._store.probe(0, [_key_of(KEYS[-1], number) for number in range(6)]))


@pytest.mark.parametrize("staged", [2 * PIECE, 32 << 20], ids=["in batches", "at once"])
def test_an_object_that_exists_is_whole(start_fresh, ending, monkeypatch, staged):
    """In a tier that has room for a third of what is stored, and for no whole number of objects."""
    monkeypatch.setattr("kvtier.connectors.lmcache._STAGED_BYTES", staged)
    daemon = start_fresh("--host-bytes", str(16 << 20), "--disk-bytes", "0")
    adapter = Adapter(daemon.address, host_bytes=47 * (PIECE + 4096), disk_bytes=None, write_policy="back")
    ending.callback(adapter.connector.close)
    draw, objects = random.Random(7), {f"k{number}": os.urandom(5 * PIECE) for number in range(30)}
    claimed = 0
    for number, (key, data) in enumerate(objects.items()):
        adapter.store([key], [data])
        for old in draw.choices([f"k{each}" for each in range(number + 1)], k=2):
            adapter.load([old], [5 * PIECE])
        names = [f"k{each}" for each in range(number + 1)]
        there = [name for name, found in zip(names, adapter.exists(names)[1], strict=True) if found]
        claimed += len(there)
        assert adapter.load(there, [5 * PIECE] * len(there)) == ([True] * len(there), [objects[name] for name in there])
    assert claimed > 60


def test_one_object_twice_in_a_batch(adapt):
    adapter = adapt()
    keys, objects, sizes = ([every[at] for at in (-1, 0, -1)] for every in (KEYS, OBJECTS, SIZES))
    assert adapter.store(keys, objects) == (True, [True] * 3)
    assert adapter.exists(keys) == (True, [True] * 3)
    assert adapter.load(keys, sizes) == ([True] * 3, objects)


def test_another_namespace_has_no_hits(adapt):
    adapt(namespace="float16").store()
    assert adapt(namespace="bfloat16").exists() == (True, [False] * 6)
    assert adapt(namespace="float16").exists() == (True, [True] * 6)


async def test_a_daemon_that_goes_is_a_miss_and_comes_back(adapt, lent):
    adapter = adapt(load_timeout=0.5)
    adapter.store()
    await eventually(partial(blocks_on_disk, lent), lambda found: found == PIECES)
    lent.kill()
    assert adapter.load() == ([True] * 6, OBJECTS), "mapped memory is there all the same"
    good, results = adapter.store(["new"], [b"object"])
    assert (good, results) == (False, [False])
    assert adapter.exists(["new"]) == (True, [False])
    lent.start()
    await eventually(lambda: adapter.store(["new"], [b"object"]), lambda answer: answer == (True, [True]))
    assert adapter.load() == ([True] * 6, OBJECTS)


async def test_what_is_found_without_the_daemon_can_be_loaded(adapt, lent):
    """Blocks that lie on disk alone are not."""
    adapter = adapt(host_bytes=10 * (PIECE + 4096))
    keys = [f"key {number}" for number in range(30)]
    objects = [os.urandom(PIECE) for _ in keys]
    assert adapter.store(keys, objects) == (True, [True] * 30)
    await eventually(partial(blocks_on_disk, lent), lambda found: found == 30)
    lent.kill()
    _, found = await eventually(lambda: adapter.exists(keys), lambda answer: not all(answer[1]))  # it has noticed
    loaded, buffers = adapter.load(keys, [PIECE] * 30)
    assert loaded == found
    assert 1 <= sum(found) <= 10
    assert [buffer for buffer, there in zip(buffers, found, strict=True) if there] == [
        each for each, there in zip(objects, found, strict=True) if there
    ]


async def test_a_daemon_that_comes_late_is_used_or_refused(adapt, lent):
    lent.stop()
    with pytest.raises(DaemonUnavailable):
        KvtierL2(address=lent.address, on_error="fail")
    adapter = adapt()
    assert adapter.store() == (False, [False] * 6)
    assert adapter.load()[0] == [False] * 6
    lent.start()
    await eventually(adapter.store, lambda answer: answer == (True, [True] * 6))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hots_bytes": 5}, "kvtier setting hots_bytes = 5: must be left out: settings are address, cache"),
        ({"block_bytes": 100}, "block_bytes = 100: must be 4096 to "),
        ({"block_bytes": "1M"}, "block_bytes = 1M: must be 4096 to "),
        ({"load_timeout": 0}, "kvtier setting load_timeout = 0: must be 0.01 to 600"),
        ({"host_bytes": "1G"}, "kvtier setting host_bytes = '1G': must be 1 to "),
        ({"host_bytes": -1}, "kvtier setting host_bytes = -1: must be 1 to "),
        (
            {"host_bytes": (1 << 20) + 4095},
            "kvtier setting host_bytes = 1052671: must be at least 1052672: a block of ",
        ),
        ({"disk_bytes": 1}, "kvtier setting disk_bytes = 1: must be at least 1052672: a block of each group of layers"),
        ({"cache": 5}, "kvtier setting cache = 5: must be of type str"),
    ],
)
def test_a_wrong_setting_is_one_line(lent, caplog, settings, message):
    given = {"address": lent.address} | settings
    with pytest.raises(InvalidArgument, match=message):
        KvtierL2(**given, on_error="fail")
    connector = KvtierL2(**given)
    assert f"LMCache runs without kvtier: {message}" in caplog.text
    assert len(caplog.messages) == 1 and "\n" not in caplog.messages[0]
    connector.submit_batch_exists(["a"])
    connector.close()
    with pytest.raises(InvalidArgument, match="on_error = maybe: must be one of continue, fail"):
        KvtierL2(address=lent.address, on_error="maybe")
