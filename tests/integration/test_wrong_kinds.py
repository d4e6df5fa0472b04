"""Arguments of the wrong kind, as somebody at a prompt gives them: refused by name, and nothing changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvtier import CacheOptions, Client, InvalidArgument, Retention, Scope, Tier, TlsFiles, TokenRange, chain_keys
from kvtier.abi.errors import FieldError
from tests.integration.blocks import SPEC, blocks, chain, sizes
from tests.integration.daemon import DaemonProcess

KEYS = chain("kinds", 2)
NEW = chain("new", 2)
WRONG: Any = {"int": 5, "text": "1", "name": "high", "range": TokenRange(0, None, 50), "bare": ((0, 5, 3),)}

CLIENT: list[tuple[str, Callable[[Any], object]]] = [
    ("name", lambda client: client.open_cache(5, SPEC)),
    ("name", lambda client: client.open_cache(b"new", SPEC)),
    ("spec", lambda client: client.open_cache("new", "a model")),
    ("budgets", lambda client: client.open_cache("new", SPEC, budgets=5)),
    ("budgets[host]", lambda client: client.open_cache("new", SPEC, budgets={"host": 1 << 20})),
    ("budgets[host]", lambda client: client.open_cache("new", SPEC, budgets={Tier.HOST: "1GiB"})),
    ("budgets[host]", lambda client: client.open_cache("new", SPEC, budgets={Tier.HOST: 1e6})),
    ("options", lambda client: client.open_cache("new", SPEC, options={"eviction": "lru"})),
    ("options.write_policy", lambda client: client.open_cache("new", SPEC, options=CacheOptions(WRONG["text"]))),
    ("timeout", lambda client: client.open_cache("new", SPEC, timeout="1")),
    (
        "options.keep_tokens",
        lambda client: client.open_cache("new", SPEC, options=CacheOptions(keep_tokens=WRONG["text"])),
    ),
    ("write", lambda client: client.open_cache("new", SPEC, write="r")),
    ("write", lambda client: client.open_cache("new", SPEC, write=b"r")),
    ("mapped", lambda client: client.open_cache("new", SPEC, mapped="no")),
    ("timeout", lambda client: client.stats(timeout="1")),
    ("timeout", lambda client: client.stats(timeout=0)),
    ("timeout", lambda client: client.stats(timeout="")),
    ("timeout", lambda client: client.stats(timeout=True)),
    ("timeout", lambda client: client.caches(timeout=0)),
    ("timeout", lambda client: client.leases(timeout=0)),
    ("timeout", lambda client: client.explain(KEYS[0], timeout=0)),
    ("timeout", lambda client: client.kick(5, timeout=0)),
    ("timeout", lambda client: client.remove_cache("c", timeout=0)),
    ("cache", lambda client: client.leases(cache=5)),
    ("cache", lambda client: client.leases(cache="")),
    ("session_id", lambda client: client.leases(session_id=0)),
    ("session_id", lambda client: client.leases(session_id=[])),
    ("session_id", lambda client: client.leases(session_id="5")),
    ("session_id", lambda client: client.kick("5")),
    ("session_id", lambda client: client.kick(5.0)),
    ("session_id", lambda client: client.kick(True)),
    ("dry_run", lambda client: client.kick(5, dry_run="x")),
    ("cache", lambda client: client.explain(KEYS[0], cache=5)),
    ("past", lambda client: client.explain(KEYS[0], past="no")),
    ("key", lambda client: client.explain(5)),
    ("key", lambda client: client.explain(5.0)),
    ("key", lambda client: client.explain([1, 2, 3, 4])),
    ("name", lambda client: client.remove_cache(5)),
    ("force", lambda client: client.remove_cache("c", force="no")),
    ("dry_run", lambda client: client.remove_cache("c", dry_run=0)),
    ("oldest", lambda client: client.watch(oldest="no")),
    ("snapshot", lambda client: client.watch(snapshot=5)),
    ("heartbeats", lambda client: client.watch(heartbeats="no")),
    ("breaks", lambda client: client.watch(breaks=None)),
    ("since", lambda client: client.watch(since=5)),
    ("since_time_ns", lambda client: client.watch(since_time_ns="1")),
    ("history", lambda client: client.watch(history="1")),
    ("types", lambda client: client.watch(types="stored")),
    ("types[0]", lambda client: client.watch(types=["stored"])),
    ("causes[0]", lambda client: client.watch(causes=["commit"])),
    ("tiers[0]", lambda client: client.watch(tiers=["host"])),
    ("tiers", lambda client: client.watch(tiers=Tier.HOST)),
    ("caches", lambda client: client.watch(caches="c")),
    ("caches[0]", lambda client: client.watch(caches=[5])),
    ("groups", lambda client: client.watch(groups=0)),
    ("groups[0]", lambda client: client.watch(groups=["0"])),
    ("keys", lambda client: client.watch(keys=5)),
    ("keys[0]", lambda client: client.watch(keys=[5])),
    ("heartbeat_s", lambda client: client.watch(heartbeat_s="1")),
]
CACHE: list[tuple[str, Callable[[Any], object]]] = [
    ("keys", lambda cache: cache.match(None)),
    ("keys", lambda cache: cache.get(5)),
    ("keys[0]", lambda cache: cache.locate("abc")),
    ("timeout", lambda cache: cache.match(KEYS, timeout="1")),
    ("timeout", lambda cache: cache.get(KEYS, timeout="1")),
    ("timeout", lambda cache: cache.release(timeout="1")),
    ("page_blocks", lambda cache: cache.pages(page_blocks="5")),
    ("page_blocks", lambda cache: cache.pages(page_blocks=-1)),
    ("tier", lambda cache: cache.slots("host")),
    ("tier", lambda cache: cache.slots(1)),
    ("tier", lambda cache: cache.lease_tier(True)),
    ("tier", lambda cache: cache.get(KEYS, tier=["host"])),
    ("verify", lambda cache: cache.get(KEYS, verify="no")),
    ("count", lambda cache: cache.reserve(True)),
    ("count", lambda cache: cache.reserve("2")),
    ("out", lambda cache: cache.get(KEYS, out=5)),
    ("blocks", lambda cache: cache.put(NEW, None)),
    ("retention", lambda cache: cache.put(NEW, blocks(NEW), retention=5)),
    ("priorities[0]", lambda cache: cache.put(NEW, blocks(NEW), priorities=[1.5, 2])),
    ("priorities[1]", lambda cache: cache.put(NEW, blocks(NEW), priorities=[1, 101])),
    ("priorities", lambda cache: cache.put(NEW, blocks(NEW), priorities="high")),
    ("priorities", lambda cache: cache.put(NEW, blocks(NEW), priorities=[])),
    ("priorities", lambda cache: cache.put(NEW, blocks(NEW), priorities=True)),
    ("blocks", lambda cache: cache.across.put(NEW, blocks(NEW))),
    ("blocks", lambda cache: cache.across.put(NEW, {True: blocks(NEW)})),
    ("priorities", lambda cache: cache.across.put(NEW, {0: blocks(NEW)}, priorities=1.5)),
    ("retention", lambda cache: cache.across.put(NEW, {0: blocks(NEW)}, retention=5)),
    ("priorities", lambda cache: cache.put(NEW, blocks(NEW), priorities=5.0)),
    ("min_blocks", lambda cache: cache.acquire(KEYS, min_blocks="1")),
    ("retention", lambda cache: cache.acquire(KEYS, retention=5)),
    ("chains", lambda cache: cache.acquire_many(b"".join(KEYS))),
    ("leases[0]", lambda cache: cache.release([])),
    ("to", lambda cache: cache.move(KEYS, "host")),
    ("tier", lambda cache: cache.pin(KEYS, "host")),
    ("to", lambda cache: cache.move(KEYS, True)),
    ("dry_run", lambda cache: cache.move(KEYS, Tier.DISK, dry_run="no")),
    ("dry_run", lambda cache: cache.drop(KEYS, dry_run="x")),
    ("dry_run", lambda cache: cache.reset(dry_run=None)),
    ("force", lambda cache: cache.reset(force="no")),
    ("priorities", lambda cache: cache.set_retention(KEYS, "high")),
    ("durations_s", lambda cache: cache.set_retention(KEYS, 5, "10")),
    ("durations_s", lambda cache: cache.set_retention(KEYS, 5, [])),
    ("group", lambda cache: cache.in_group("0")),
    ("scope", lambda cache: cache.prompt([1] * 32, "tenant")),
]
WRITE_LEASE: list[tuple[str, Callable[[Any], object]]] = [
    ("index", lambda lease: lease.view("0")),
    ("index", lambda lease: lease.view(None)),
    ("index", lambda lease: lease.tensors(0.0)),
    ("release", lambda lease: lease.commit(NEW, release="no")),
    ("at", lambda lease: lease.commit(NEW, at=0)),
    ("at[1]", lambda lease: lease.commit(NEW, at=[0, "1"])),
    ("parents", lambda lease: lease.commit(NEW, parents=5)),
]
READ_LEASE: list[tuple[str, Callable[[Any], object]]] = [
    ("index", lambda lease: lease.view("0")),
    ("index", lambda lease: lease.view([0])),
    ("blocks", lambda lease: lease.trim("1")),
    ("blocks", lambda lease: lease.trim(True)),
]
ALONE: list[tuple[str, Callable[[], object]]] = [
    ("ranges", lambda: Retention(WRONG["int"])),
    ("ranges", lambda: Retention(WRONG["range"])),
    ("ranges[0]", lambda: Retention(WRONG["bare"])),
    ("ranges[0].start", lambda: Retention((TokenRange(WRONG["text"], None, 5),))),
    ("ranges[0].priority", lambda: Retention((TokenRange(0, None, WRONG["name"]),))),
    ("decode_priority", lambda: Retention(decode_priority=WRONG["name"])),
    ("decode_duration_s", lambda: Retention(decode_duration_s=WRONG["text"])),
    ("scope", lambda: chain_keys([1] * 32, 32, WRONG["name"])),
    ("scope.salt", lambda: chain_keys([1] * 32, 32, Scope(salt=WRONG["int"]))),
    ("address", lambda: Client(WRONG["int"])),
    ("timeout", lambda: Client(timeout=WRONG["text"])),
    ("wait", lambda: Client(wait=WRONG["text"])),
    ("tls", lambda: Client("localhost:5000", tls=WRONG["name"])),
    ("tls.ca", lambda: Client("localhost:5000", tls=TlsFiles(*[WRONG["int"]] * 3))),
    ("tls.ca", lambda: Client("localhost:5000", tls=TlsFiles(*["no such file"] * 3))),  # type: ignore[arg-type]
    ("insecure", lambda: Client("localhost:5000", insecure=WRONG["text"])),
]


@pytest.mark.parametrize(("field", "make"), ALONE)
def test_values_and_clients(field: str, make: Callable[[], object]) -> None:
    with pytest.raises((InvalidArgument, FieldError)) as caught:
        make()
    error = caught.value
    assert isinstance(error, InvalidArgument | FieldError)
    assert error.field == field


def assert_refused(of: object, calls: list[tuple[str, Callable[[Any], object]]]) -> None:
    for field, call in calls:
        with pytest.raises(InvalidArgument) as caught:
            call(of)
        assert caught.value.field == field


def test_leases(daemon: DaemonProcess) -> None:
    with Client(daemon.address) as client:
        cache = client.open_cache("c", SPEC, budgets=sizes(host=4))
        cache.put(KEYS, blocks(KEYS))
        with cache.reserve(2) as blank:
            assert_refused(blank, WRITE_LEASE)
            assert (len(blank.blank), cache.match(NEW).blocks) == (2, 0)
        with cache.acquire(KEYS) as held:
            assert_refused(held, READ_LEASE)
            assert held.blocks == 2


def test_flags_of_numpys_are_flags(daemon: DaemonProcess) -> None:
    yes: Any = np.True_
    with Client(daemon.address) as client:
        cache = client.open_cache("flags", SPEC, budgets=sizes(host=4), write=yes, mapped=yes)
        cache.put(NEW, blocks(NEW), tier=Tier.HOST)
        assert (cache.reset(dry_run=yes).dropped, cache.match(NEW).blocks) == (2, 2)
        with pytest.raises(InvalidArgument):
            client.watch(oldest=yes, snapshot=yes)


def test_verbs(daemon: DaemonProcess) -> None:
    with Client(daemon.address) as client:
        cache = client.open_cache("c", SPEC, budgets=sizes(host=4))
        cache.put(KEYS, blocks(KEYS), tier=Tier.HOST)
        before = client.stats().last_event_id
        assert_refused(client, CLIENT)
        assert_refused(cache, CACHE)
        assert "new" not in [info.name for info in client.caches()]
        assert (client.stats().last_event_id, client.leases(cache="c")) == (before, [])
