"""docs/wire.md: its test vectors, and the client in another language that follows it."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import xxhash

from kvtier import Client, Tier
from kvtier.abi.keys import MultimodalItem, Scope, chain_keys, root
from kvtier.wire import split_keys

ROOT = Path(__file__).parents[2]
VECTORS = json.loads((ROOT / "docs/wire-vectors.json").read_text())
EVERYBODY = '{"anonymous": true, "caches": ["*"], "verbs": ["read", "write", "watch"]}'


@pytest.mark.parametrize("case", VECTORS["keys"], ids=lambda case: case["name"])
def test_keys_are_those_of_the_vectors(case):
    lora = case.get("lora_id")
    items = [
        MultimodalItem(bytes.fromhex(item["digest"]), item["first_token"], item["tokens"])
        for item in case.get("multimodal", ())
    ]
    scope = Scope(None if lora is None else int(lora), case.get("cache_salt"), tuple(items))
    extra = [int(each) for each in case["extra_ids"]] if "extra_ids" in case else None
    partial = case.get("partial", False)
    keys = chain_keys(case["token_ids"], case["tokens_per_block"], scope, extra, partial=partial)
    assert root(scope).hex() == case["root"]
    assert [key.hex() for key in split_keys(keys)] == case["keys"]


def test_checksums_are_those_of_the_vectors():
    for case in VECTORS["checksums"]:
        assert xxhash.xxh3_128_hexdigest(bytes.fromhex(case["bytes"])) == case["xxh3_128"]


def test_the_vectors_know_every_part_of_a_key():
    parts = {"lora_id", "cache_salt", "extra_ids", "multimodal", "partial"}
    assert set().union(*VECTORS["keys"]) == parts | {"name", "token_ids", "tokens_per_block", "root", "keys"}


def test_heartbeats_are_as_far_apart_as_the_page_says(start_daemon):
    daemon = start_daemon("--listen-tcp", "127.0.0.1:0", "--tcp-insecure", "--allow", EVERYBODY, host=8)
    with Client(daemon.tcp_address, insecure=True) as client:
        told = client.inner._session.welcome.heartbeat_ns / 1e9
    assert f"every heartbeat_ns, by default {told:g} s" in (ROOT / "docs/wire.md").read_text()


@pytest.mark.long
def test_a_client_in_node_does_as_the_page_says(start_daemon, tmp_path):
    """It derives the same keys, stores blocks that Python reads, and reads them itself."""
    for part in ("proto", "examples/node"):
        shutil.copytree(ROOT / part, tmp_path / part, ignore=shutil.ignore_patterns("node_modules"))
    example = tmp_path / "examples/node"
    run("npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", cwd=example)
    daemon = start_daemon("--listen-tcp", "127.0.0.1:0", "--tcp-insecure", "--allow", EVERYBODY, host=1024)
    said = run("node", "client.js", daemon.tcp_address, cwd=example)
    for line in ("put: results 0 0 0 0", "match: 4 blocks", "get: 4 blocks as they were put"):
        assert line in said.splitlines()
    keys = split_keys(chain_keys(range(64), 16))
    assert re.search(f"^event: EVENT_TYPE_STORED CAUSE_COMMIT {keys[0].hex()[:8]} node-example$", said, re.MULTILINE)
    with Client(daemon.address) as client:
        assert not [one for one in client.stats().sessions if not one.pid], "it left its session behind"
        cache = client.open_cache("node-example")
        blocks = cache.get(keys, tier=Tier.HOST)
        assert [bytes(block) for block in blocks] == [bytes([place + 1]) * 16384 for place in range(4)]


def run(*command, cwd):
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
