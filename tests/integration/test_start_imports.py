"""What a start does not wait for: packages that serving does not need are not imported on the way to it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from kvtier import connect
from tests.integration.blocks import SPEC, assert_bytes, blocks, chain

NOT_NEEDED = ("torch", "cuda", "prometheus_client", "rich")
_TRAP = """
with open({mark!r}, "a") as mark:
    mark.write({name!r} + "\\n")
raise ImportError({name!r})
"""


@pytest.fixture
def trapped(tmp_path, monkeypatch):
    """Whoever imports one of these from now on leaves its name in this file, and fails."""
    mark = tmp_path / "imported"
    mark.touch()
    for name in NOT_NEEDED:
        (tmp_path / f"{name}.py").write_text(_TRAP.format(mark=str(mark), name=name))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    return mark


def imported(mark):
    return mark.read_text().split()


async def test_a_daemon_serves_without_them(trapped, start_daemon):
    daemon = start_daemon(device=4, host=4, disk=8)
    async with await connect(daemon.address) as client:
        cache = await client.open_cache("c", SPEC)
        keys = chain("imports", 3)
        await cache.put(keys, blocks(keys))
        assert_bytes(keys, await cache.get(keys))
    assert imported(trapped) == []


def test_the_trap_works(trapped):
    for name in NOT_NEEDED:
        assert subprocess.run(
            [sys.executable, "-c", f"import {name}"], stderr=subprocess.DEVNULL, check=False
        ).returncode
    assert imported(trapped) == list(NOT_NEEDED)
