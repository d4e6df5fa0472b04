"""Files of another version of kvtier: read, or set aside whole. Never deleted, never called damaged.

``tests/data/cache-N.tar.xz``: state and disk of a daemon that stored the chain ``a`` in the cache ``kept`` and stopped;
N is the format of the cache. A new format gets a file of its own, and the old ones stay.
"""

import json
import re
import tarfile
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
import xxhash

from kvtier import Client, Tier
from kvtier.abi.words import BlockResult
from kvtierd.core.ids import GroupId, Key, Label, SlotId, Traits
from kvtierd.service.forgotten import Past
from kvtierd.service.remote import telling
from kvtierd.tiers.disk.records import encode_record
from kvtierd.tiers.disk.superblock import SUPERBLOCK, format_version
from kvtierd.tiers.remote import objects
from kvtierd.tiers.remote.base import CHECKSUM_BYTES
from tests.integration.blocks import SLOT_BYTES, SPEC, assert_bytes, blocks, chain
from tests.integration.daemon import DaemonProcess
from tests.integration.waiting import eventually

DATA = Path(__file__).parents[1] / "data"
KEYS = chain("a", 4)
SIZES = {Tier.HOST: 16 * SLOT_BYTES, Tier.DISK: 16 * SLOT_BYTES}
BUDGETS = dict.fromkeys(SIZES, 8 * SLOT_BYTES)
TRAITS = Traits(40, 1000, 2000, Label(b"h" * 8, b"t" * 16, b"c" * 16, b"s" * 3))


@pytest.fixture
def daemon(short_dir):
    daemon = DaemonProcess(short_dir, SIZES)
    yield daemon
    if daemon.running:
        daemon.stop()


@pytest.mark.parametrize("archive", sorted(DATA.glob("cache-*.tar.xz")), ids=lambda path: path.name)
def test_what_an_earlier_version_stored_is_read_or_set_aside(daemon, archive):
    with tarfile.open(archive) as tar:
        tar.extractall(daemon.home, filter="data")
    daemon.start()
    with Client(daemon.address) as client:
        found = client.open_cache("kept", SPEC, budgets=BUDGETS).get(KEYS)
        assert_bytes(KEYS[: len(found)], found)
    version = int(re.findall(r"\d+", archive.name)[0])
    assert len(found) == (4 if version == format_version("cache") else 0)
    assert (daemon.disk_dir / "caches/.aside-kept").exists() == (not found)
    assert "corrupt" not in daemon.log


def test_there_is_a_file_of_this_version():
    assert (DATA / f"cache-{format_version('cache')}.tar.xz").exists()


def test_a_cache_of_a_later_version_is_set_aside(daemon):
    """A host is set back to the version before."""
    daemon.start()
    with Client(daemon.address) as client:
        cache = client.open_cache("c", SPEC, budgets=BUDGETS)
        assert cache.put(KEYS, blocks(KEYS)) == [BlockResult.OK] * 4
        cache.move(KEYS, Tier.DISK)
    daemon.stop()
    there = daemon.disk_dir / "caches/c"
    block = there / SUPERBLOCK
    block.write_bytes(block.read_bytes().replace(b"kvtier cache %d " % format_version("cache"), b"kvtier cache 99 "))
    before = {path.name: path.read_bytes() for path in there.rglob("*") if path.is_file()}
    daemon.start()
    aside = there.with_name(".aside-c")
    assert {path.name: path.read_bytes() for path in aside.rglob("*") if path.is_file()} == before
    (line,) = [line for line in daemon.log.splitlines() if "set aside" in line]
    assert f"format version 99; this daemon reads version {format_version('cache')}" in line
    with Client(daemon.address) as client:
        cache = client.open_cache("c", SPEC, budgets=BUDGETS)
        assert cache.get(KEYS) == []
        assert cache.put(KEYS, blocks(KEYS)) == [BlockResult.OK] * 4
    assert "corrupt" not in daemon.log


async def test_objects_of_a_later_version_are_left_alone(start_fresh, tmp_path):
    store = tmp_path / "store"
    store.mkdir()
    remote = f'{{"url": "file://{store}", "write": "through"}}'
    hosts = [start_fresh("--remote", remote, host=16, disk=16) for _ in range(2)]
    with Client(hosts[0].address) as client:
        client.open_cache("c", SPEC).put(KEYS, blocks(KEYS))
        await eventually(lambda: [path for path in store.rglob("*") if path.is_file()], lambda found: len(found) == 4)
    found = {path: bytearray(path.read_bytes()) for path in store.rglob("*") if path.is_file()}
    for path, data in found.items():
        data[CHECKSUM_BYTES + 7] += 1
        data[:CHECKSUM_BYTES] = xxhash.xxh3_128_digest(bytes(data[CHECKSUM_BYTES:]))
        path.write_bytes(data)
    with Client(hosts[1].address) as client:
        cache = client.open_cache("c", SPEC)
        for _ in range(2):
            assert cache.get(KEYS) == []
        blocks_told = client.stats().remote.blocks
    assert blocks_told.get("other version", 0) > 0 == blocks_told.get("damaged", 0)
    assert {path: path.read_bytes() for path in store.rglob("*") if path.is_file()} == found
    assert len(re.findall(r"version 2; this daemon reads version 1", hosts[1].log)) == 1


PLACE = objects.GroupPrefix("c", b"f" * 32, GroupId(1))
RECORD = encode_record(Key(KEYS[1]), SlotId(7), 8, 9, b"x" * 16, Key(KEYS[0]), TRAITS)
PAST = json.dumps(Past(7, {(GroupId(1), Key(KEYS[0])): 8}).encoded()).encode()
OBJECT = objects.encode(PLACE, Key(KEYS[1]), Key(KEYS[0]), TRAITS, [np.frombuffer(b"bytes", np.uint8)])


@pytest.mark.parametrize(
    ("made", "version", "digest"),
    [
        (RECORD, format_version("cache"), {2: "de71ff0c61d8c62b"}),
        (OBJECT, objects.VERSION, {1: "1fec0cc365249d8b"}),
        (PAST, telling.VERSION, {1: "52122152c4412c4e"}),
        (PAST, format_version("forgotten"), {1: "52122152c4412c4e"}),
    ],
    ids=["record", "object", "past", "past on disk"],
)
def test_the_number_moves_with_the_layout(made, version, digest):
    """Other bytes need another number: of a cache, of an object, of what is forgotten."""
    assert sha256(made).hexdigest()[:16] == digest[version]
