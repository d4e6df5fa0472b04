"""What a real daemon writes to its log, and what it must never write there."""

from __future__ import annotations

import os
import subprocess
import sys

from kvtier import Tier, connect
from tests.integration.blocks import SPEC, blocks, chain, sizes
from tests.integration.raw import attached


async def test_no_token_and_no_key_is_ever_logged(start_daemon):
    daemon = start_daemon("--log-level", "debug", device=4, host=4, disk=8)
    keys = chain("secret", 12)
    async with await connect(daemon.address) as client, attached(daemon.address) as raw:
        cache = await client.open_cache("c", SPEC, budgets=sizes(device=4, host=4, disk=8))
        await cache.put(keys, blocks(keys))
        await cache.get(keys)
        await cache.move(keys[:2], Tier.DISK)
        await cache.drop(keys[:1])
        await raw.open("c")
        raw.detach()
    daemon.stop()
    assert "cache opened" in daemon.log and "session begins" in daemon.log
    for secret in (raw.welcome.token, *(key.hex() for key in keys), *(repr(key)[2:-1] for key in keys)):
        assert secret not in daemon.log
        assert secret.upper() not in daemon.log


def test_the_journal_has_what_stops_a_start_among_the_errors(tmp_path):
    """Where `journalctl -p err` finds it, as it does what is logged later."""
    file = tmp_path / "kvtierd.toml"
    file.write_text('hots_bytes = "1GiB"\n')
    with (tmp_path / "journal").open("w+") as journal:
        status = os.fstat(journal.fileno())
        variables = os.environ | {"JOURNAL_STREAM": f"{status.st_dev}:{status.st_ino}"}
        command = [sys.executable, "-m", "kvtierd.main", "--config", str(file)]
        ended = subprocess.run(command, stderr=journal, env=variables, check=False, timeout=60)
        journal.seek(0)
        lines = journal.read().splitlines()
    assert ended.returncode == 2
    assert len(lines) == 1 and lines[0].startswith(f"<3>kvtierd: {file}: hots_bytes: "), lines
