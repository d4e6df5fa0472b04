"""What kvtierd's unit does under a real systemd: the guest's part of systemd_vm.py.

Runs as root, by the Python that kvtier is installed for, in a virtual machine that is thrown away. Prints ``ok: ...``
or ``failed: ...`` for each part, and at the end how many of each.
"""

import os
import pwd
import re
import signal
import stat
import subprocess
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

import kvtier

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


def same(found: object, wanted: object) -> None:
    if found != wanted:
        raise RuntimeError(f"{found}, not {wanted}")


def show(name: str) -> str:
    return run("systemctl", "show", UNIT, f"--property={name}", "--value").strip()


def mode(path: Path) -> tuple[str, str]:
    return oct(stat.S_IMODE(path.stat().st_mode)), pwd.getpwuid(path.stat().st_uid).pw_name


def wait_for_another(pid: str) -> None:
    """Until another process than ``pid`` serves."""
    until = time.monotonic() + PATIENCE_S
    while show("ActiveState") != "active" or show("MainPID") in ("0", pid):
        if time.monotonic() > until:
            raise RuntimeError(f"no other daemon serves: {run('systemctl', 'status', UNIT)}")
        time.sleep(1)


class Trial:
    """The parts in their order."""

    def install(self) -> None:
        """the commands of docs/operations.md make the user, the directories and a valid configuration"""
        run("sh", "-eu", "files.sh")
        same(pwd.getpwnam("kvtier").pw_dir, str(STATE))
        same(mode(CONFIGURATION), ("0o640", "root"))
        text = CONFIGURATION.read_text()
        for key, size in (("host_bytes", "8MiB"), ("disk_bytes", "64MiB")):
            text = re.sub(rf'^{key} = ".*"$', f'{key} = "{size}"', text, flags=re.MULTILINE)
        CONFIGURATION.write_text(text)
        run("kvtierd", "--check-config", "--config", str(CONFIGURATION))

    def start(self) -> None:
        """the unit is active once the daemon has said READY, and its directories keep others out"""
        run("sh", "-eu", "start.sh")
        same([show("ActiveState"), show("Type"), show("StatusText")], ["active", "notify", f"serving at {RUNTIME}"])
        same([mode(RUNTIME), mode(STATE)], [("0o750", "kvtier"), ("0o700", "kvtier")])
        about = [line for line in run("systemd-analyze", "verify", UNIT).splitlines() if "kvtierd" in line]
        same(about, [])

    def confined(self) -> None:
        """the hardening is in force in the process"""
        process = Path("/proc", show("MainPID"))
        status = dict(re.findall(r"^(\w+):\t(.*)$", (process / "status").read_text(), re.MULTILINE))
        capabilities = dict.fromkeys(("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"), "0" * 16)
        wanted = capabilities | {"NoNewPrivs": "1", "Seccomp": "2"}
        same({name: status[name] for name in wanted}, wanted)
        same(set(status["Uid"].split()), {str(pwd.getpwnam("kvtier").pw_uid)})
        for namespace in ("mnt", "ipc"):
            if os.readlink(process / "ns" / namespace) == os.readlink(f"/proc/1/ns/{namespace}"):
                raise RuntimeError(f"{namespace} is the system's")
        mounts = {line.split()[4]: line.split()[5][:2] for line in (process / "mountinfo").read_text().splitlines()}
        same([mounts["/"], mounts[str(STATE)], mounts[str(RUNTIME)]], ["ro", "rw", "rw"])
        devices = {path.name for path in (process / "root/dev").iterdir()}
        same({"vda", "mem", "null"} & devices, {"null"})
        limits = re.findall(r"^Max (locked memory|open files) +(\S+)", (process / "limits").read_text(), re.MULTILINE)
        same(dict(limits), {"locked memory": "unlimited", "open files": "524288"})

    def blocks(self) -> None:
        """blocks are put and read in shared memory and on disk; systemd keeps the descriptors of the memory"""
        self.client = kvtier.Client(timeout=PATIENCE_S, wait=PATIENCE_S)
        self.cache = self.client.open_cache("trial", SPEC, budgets=BUDGETS)
        for keys in (IN_MEMORY, ON_DISK):
            self.cache.put(keys, [self._block(key) for key in keys], tier=kvtier.Tier.HOST)
        self.cache.move(ON_DISK, kvtier.Tier.DISK)
        same(self.cache.mapped, True)
        self._read()
        if int(show("NFileDescriptorStore")) < 4:
            raise RuntimeError(f"{show('NFileDescriptorStore')} descriptors are stored")

    def restart(self) -> None:
        """systemctl restart keeps the blocks, and the client goes on"""
        before = show("MainPID")
        run("systemctl", "restart", UNIT)
        wait_for_another(before)
        self._read()

    def killed(self) -> None:
        """after kill -9 systemd starts the daemon again, with the blocks in memory"""
        before = show("MainPID")
        os.kill(int(before), signal.SIGKILL)
        wait_for_another(before)
        self._read()

    def watchdog(self) -> None:
        """a daemon that stands still is killed by the watchdog and started again, with its blocks"""
        before = show("MainPID")
        os.kill(int(before), signal.SIGSTOP)
        wait_for_another(before)
        if "Watchdog timeout" not in run("journalctl", "--unit", UNIT, "--output=cat", "--no-pager"):
            raise RuntimeError("the journal does not tell of the watchdog")
        self._read()

    def stop(self) -> None:
        """systemctl stop leaves no process, no socket and no descriptor, and a start has the blocks on disk"""
        run("systemctl", "stop", UNIT)
        same([show("Result"), show("NFileDescriptorStore"), RUNTIME.exists()], ["success", "0", False])
        same(subprocess.run(["pgrep", "-u", "kvtier"], check=False).returncode, 1)
        run("systemctl", "start", UNIT)
        self._read(ON_DISK)

    def _read(self, *chains: list[bytes]) -> None:
        for keys in chains or (IN_MEMORY, ON_DISK):
            found = self.cache.get(keys)
            wrong = [key for key, row in zip(keys, found, strict=True) if not np.array_equal(row, self._block(key))]
            same(wrong, [])

    def _block(self, key: bytes) -> NDArray[np.uint8]:
        """Bytes that follow from the key."""
        return np.random.default_rng(list(key)).integers(0, 256, SPEC.block_bytes(0), dtype=np.uint8)

    def parts(self) -> list[Callable[[], None]]:
        return [
            *(self.install, self.start, self.confined, self.blocks),
            *(self.restart, self.killed, self.watchdog, self.stop),
        ]


def main() -> None:
    counts = {"ok": 0, "failed": 0}
    for part in Trial().parts():
        verdict, why = "ok", ""
        try:
            part()
        except Exception:  # noqa: BLE001  told, and the parts after it are still worth a try
            verdict, why = "failed", f"\n{traceback.format_exc()}"
        counts[verdict] += 1
        print(f"{verdict}: {part.__doc__}{why}", flush=True)
    if counts["failed"]:
        print(run("journalctl", "--unit", UNIT, "--no-pager", "--lines=300"))
    print(f"systemd-vm: {counts['ok']} ok, {counts['failed']} failed", flush=True)


if __name__ == "__main__":
    main()
