"""Tests of kvtierd's unit under a real systemd: the guest's part of systemd_vm.py.

pytest runs them in their order, as root, by the Python that kvtier is installed for, in a virtual machine that is
thrown away.
"""

import os
import pwd
import re
import signal
import stat
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np
import pytest
from numpy.typing import NDArray

import kvtier
from kvtier.sync.cache import SyncCache

HERE: Final = Path(__file__).resolve().parent
UNIT: Final = "kvtierd.service"
CONFIGURATION: Final = Path("/etc/kvtier/kvtierd.toml")
RUNTIME: Final = Path("/run/kvtier")
STATE: Final = Path("/var/lib/kvtier")
SPEC: Final = kvtier.CacheSpec.single("trial", "float16", tokens_per_block=16, layers=2, kv_heads=4, head_size=64)
IN_MEMORY: Final = [b"memory%026d" % number for number in range(48)]
ON_DISK: Final = [b"disk%028d" % number for number in range(32)]
BUDGETS: Final = {kvtier.Tier.HOST: 4 << 20, kvtier.Tier.DISK: 16 << 20}
"""The host tier has room for every block, so that those of IN_MEMORY are in memory only."""
PATIENCE_S: Final = 600.0
"""An emulated processor is slower than a real one by a factor of ten and more."""


def run(*command: str) -> str:
    """What it prints on both streams. Raises RuntimeError if it fails."""
    ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, cwd=HERE)
    if ended.returncode:
        raise RuntimeError(f"{' '.join(command)}: exit status {ended.returncode}: {ended.stdout.strip()[-2000:]}")
    return ended.stdout


def show(name: str) -> str:
    return run("systemctl", "show", UNIT, f"--property={name}", "--value").strip()


def mode(path: Path) -> tuple[str, str]:
    return oct(stat.S_IMODE(path.stat().st_mode)), pwd.getpwuid(path.stat().st_uid).pw_name


def wait_for_another(pid: str) -> None:
    """Until another process than ``pid`` serves."""
    until = time.monotonic() + PATIENCE_S
    while show("ActiveState") != "active" or show("MainPID") in ("0", pid):
        assert time.monotonic() < until, run("systemctl", "status", UNIT)
        time.sleep(1)


@pytest.fixture(scope="module")
def cache() -> Iterator[SyncCache]:
    with kvtier.Client(timeout=PATIENCE_S, wait=PATIENCE_S) as client:
        yield client.open_cache("trial", SPEC, budgets=BUDGETS)


def block(key: bytes) -> NDArray[np.uint8]:
    """Bytes that follow from the key."""
    return np.random.default_rng(list(key)).integers(0, 256, SPEC.block_bytes(0), dtype=np.uint8)


def read(cache: SyncCache, *chains: list[bytes]) -> None:
    for keys in chains:
        wrong = [key for key, row in zip(keys, cache.get(keys), strict=True) if not np.array_equal(row, block(key))]
        assert wrong == []


def test_the_commands_of_the_page_make_the_user_the_directories_and_a_valid_configuration() -> None:
    run("sh", "-eu", "files.sh")
    assert pwd.getpwnam("kvtier").pw_dir == str(STATE)
    assert mode(CONFIGURATION) == ("0o640", "root")
    text = CONFIGURATION.read_text()
    for key, size in (("host_bytes", "8MiB"), ("disk_bytes", "64MiB")):
        text = re.sub(rf'^{key} = ".*"$', f'{key} = "{size}"', text, flags=re.MULTILINE)
    CONFIGURATION.write_text(text)
    run("kvtierd", "--check-config", "--config", str(CONFIGURATION))


def test_the_unit_is_active_once_the_daemon_is_ready_and_its_directories_keep_others_out() -> None:
    run("sh", "-eu", "start.sh")
    assert (show("ActiveState"), show("Type"), show("StatusText")) == ("active", "notify", f"serving at {RUNTIME}")
    assert (mode(RUNTIME), mode(STATE)) == (("0o750", "kvtier"), ("0o700", "kvtier"))
    assert "kvtierd" not in run("systemd-analyze", "verify", UNIT)


def test_the_hardening_is_in_force_in_the_process() -> None:
    process = Path("/proc", show("MainPID"))
    status = dict(re.findall(r"^(\w+):\t(.*)$", (process / "status").read_text(), re.MULTILINE))
    capabilities = dict.fromkeys(("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"), "0" * 16)
    wanted = capabilities | {"NoNewPrivs": "1", "Seccomp": "2"}
    assert {name: status[name] for name in wanted} == wanted
    assert set(status["Uid"].split()) == {str(pwd.getpwnam("kvtier").pw_uid)}
    for namespace in ("ns/mnt", "ns/ipc"):
        assert os.readlink(process / namespace) != os.readlink(f"/proc/1/{namespace}")
    mounts = {line.split()[4]: line.split()[5][:2] for line in (process / "mountinfo").read_text().splitlines()}
    assert [mounts["/"], mounts[str(STATE)], mounts[str(RUNTIME)]] == ["ro", "rw", "rw"]
    devices = {path.name for path in (process / "root/dev").iterdir()}
    assert {"vda", "mem", "null"} & devices == {"null"}
    limits = re.findall(r"^Max (locked memory|open files) +(\S+)", (process / "limits").read_text(), re.MULTILINE)
    assert dict(limits) == {"locked memory": "unlimited", "open files": "524288"}


def test_blocks_are_in_memory_and_on_disk_and_systemd_keeps_the_memory(cache: SyncCache) -> None:
    for keys in (IN_MEMORY, ON_DISK):
        cache.put(keys, [block(key) for key in keys], tier=kvtier.Tier.HOST)
    cache.move(ON_DISK, kvtier.Tier.DISK)
    assert cache.mapped
    read(cache, IN_MEMORY, ON_DISK)
    assert int(show("NFileDescriptorStore")) >= 4


def test_a_restart_keeps_the_blocks_and_the_client_goes_on(cache: SyncCache) -> None:
    before = show("MainPID")
    run("systemctl", "restart", UNIT)
    wait_for_another(before)
    read(cache, IN_MEMORY, ON_DISK)


def test_a_killed_daemon_is_started_again_with_the_blocks_in_memory(cache: SyncCache) -> None:
    before = show("MainPID")
    os.kill(int(before), signal.SIGKILL)
    wait_for_another(before)
    read(cache, IN_MEMORY, ON_DISK)


def test_a_daemon_that_stands_still_is_killed_by_the_watchdog(cache: SyncCache) -> None:
    before = show("MainPID")
    os.kill(int(before), signal.SIGSTOP)
    wait_for_another(before)
    assert "Watchdog timeout" in run("journalctl", "--unit", UNIT, "--output=cat", "--no-pager")
    read(cache, IN_MEMORY, ON_DISK)


def test_a_stop_leaves_nothing_and_a_start_has_the_blocks_on_disk(cache: SyncCache) -> None:
    run("systemctl", "stop", UNIT)
    assert (show("Result"), show("NFileDescriptorStore"), RUNTIME.exists()) == ("success", "0", False)
    assert subprocess.run(["pgrep", "-u", "kvtier"], check=False).returncode == 1
    run("systemctl", "start", UNIT)
    read(cache, ON_DISK)
