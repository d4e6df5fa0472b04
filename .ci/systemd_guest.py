"""What kvtierd's unit does under a real systemd: the guest's part of systemd_vm.py.

Runs as root in a virtual machine that is thrown away, by Debian's Python and with nothing but the standard library.
Prints a line for each thing that was to be shown, ``ok: ...`` or ``failed: ...``, and at the end how many of each.
"""

import grp
import json
import os
import pwd
import re
import signal
import stat
import subprocess
import sys
import time
import traceback
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

HERE: Final = Path(__file__).resolve().parent
UNIT: Final = "kvtierd.service"
CONFIGURATION: Final = Path("/etc/kvtier/kvtierd.toml")
RUNTIME: Final = Path("/run/kvtier")
STATE: Final = Path("/var/lib/kvtier")
ELSEWHERE: Final = Path("/srv/kvtier")
METRICS: Final = "127.0.0.1:9464"
HOST_BLOCKS: Final = 48
DISK_BLOCKS: Final = 32
PATIENCE_S: Final = 600.0
"""An emulated processor is slower than a real one by a factor of ten and more."""
PIP: Final = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(HERE / "wheels"), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
REFUSED: Final = 2
"""The daemon's exit status for a configuration that it does not take."""


class Failed(Exception):
    """What was to be shown is not so, or could not be asked."""


def hold(true: bool, otherwise: object) -> None:
    if not true:
        raise Failed(str(otherwise))


def run(*command: str, user: str | None = None, status: int | None = 0, env: Mapping[str, str] | None = None) -> str:
    """What it prints, on both streams. ``user``: who runs it. ``status``: how it must end; None: as it likes."""
    who: dict[str, Any] = {} if user is None else identity(user)
    ended: subprocess.CompletedProcess[str] = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        check=False,
        timeout=2 * PATIENCE_S,
        env=os.environ | (env or {}),
        cwd="/",
        **who,
    )
    if status is not None and ended.returncode != status:
        raise Failed(f"{' '.join(command)}: exit status {ended.returncode}, said: {ended.stdout.strip()[-2000:]}")
    return ended.stdout


def identity(user: str) -> dict[str, Any]:
    entry = pwd.getpwnam(user)
    return {"user": user, "group": entry.pw_gid, "extra_groups": os.getgrouplist(user, entry.pw_gid)}


def script(name: str) -> str:
    """One of the blocks of docs/operations.md, as a reader types it, beside the files it names."""
    return run("sh", "-euc", f"cd {HERE}; . ./{name}")


def show(name: str) -> str:
    return run("systemctl", "show", UNIT, f"--property={name}", "--value").strip()


def main_pid() -> int:
    return int(show("MainPID"))


def until(what: str, true: Callable[[], bool], within: float = PATIENCE_S) -> float:
    """Seconds until something is so that only asking tells."""
    began = time.monotonic()
    while not true():
        if (took := time.monotonic() - began) > within:
            raise Failed(f"{what}: not within {took:.0f} s; {run('systemctl', 'status', UNIT, status=None)}")
        time.sleep(1)
    return time.monotonic() - began


def serving_anew(old: int) -> bool:
    """Whether another process than ``old`` has said that it serves."""
    return show("ActiveState") == "active" and main_pid() not in (0, old)


def journal(*more: str) -> list[dict[str, Any]]:
    """The unit's entries since the boot, those of systemd about it included."""
    run("journalctl", "--sync")
    lines = run("journalctl", "--unit", UNIT, "--output=json", "--no-pager", "-q", *more).splitlines()
    return [json.loads(line) for line in lines]


def messages(since: int = 0) -> list[str]:
    """Of the entries from this one on."""
    return [str(entry["MESSAGE"]) for entry in journal()[since:]]


def said(text: str, since: int = 0) -> bool:
    return any(text in message for message in messages(since))


def status_of(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def mode(path: Path) -> tuple[int, str, str]:
    found = path.stat()
    return stat.S_IMODE(found.st_mode), pwd.getpwuid(found.st_uid).pw_name, grp.getgrgid(found.st_gid).gr_name


class Engine:
    """systemd_engine.py in a process of its own, as another user."""

    def __init__(self, user: str) -> None:
        command = ["/opt/kvtier/bin/python", str(HERE / "systemd_engine.py")]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd="/", **identity(user))

    def ask(self, verb: str, *arguments: object) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        with waking(PATIENCE_S):
            self._process.stdin.write(json.dumps([verb, *arguments]) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        hold(bool(line), f"the engine says nothing to {verb}; exit status {self._process.poll()}")
        answer: dict[str, Any] = json.loads(line)
        hold("error" not in answer, f"{verb}: {answer}")
        return answer


@contextmanager
def waking(after: float) -> Iterator[None]:
    """Raises :class:`Failed` in what takes longer."""

    def late(_number: int, _frame: object) -> None:
        raise Failed(f"not within {after:.0f} s")

    signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, after)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


class Trial:
    """The parts in their order. Each returns what is worth telling of it."""

    def __init__(self) -> None:
        self._engine: Engine | None = None

    @property
    def engine(self) -> Engine:
        hold(self._engine is not None, "there is no engine")
        assert self._engine is not None
        return self._engine

    def versions(self) -> str:
        """the machine is what it is taken for"""
        hold(Path("/run/systemd/system").is_dir(), "systemd is not the first process")
        return f"{run('systemctl', '--version').splitlines()[0]}, Linux {os.uname().release}, {sys.version.split()[0]}"

    def install(self) -> str:
        """the package that docs/operations.md installs accepts the configuration that its commands install"""
        script("files.sh")
        return run("kvtierd", "--check-config", "--config", str(CONFIGURATION)).strip()

    def user_and_directories(self) -> str:
        """systemd-sysusers and systemd-tmpfiles make the user, the group and the directories"""
        user = pwd.getpwnam("kvtier")
        hold(user.pw_dir == str(STATE) and user.pw_shell.endswith("nologin") and user.pw_uid < 1000, user)
        hold(mode(CONFIGURATION.parent) == (0o750, "root", "kvtier"), mode(CONFIGURATION.parent))
        hold(mode(CONFIGURATION) == (0o640, "root", "kvtier"), mode(CONFIGURATION))
        return f"uid {user.pw_uid}"

    def start(self) -> str:
        """the unit as shipped starts, and is active only once the daemon has said READY"""
        for name, groups in (("engine", ["-G", "kvtier"]), ("member", ["-G", "kvtier"]), ("stranger", [])):
            run("useradd", *groups, name)
        text = CONFIGURATION.read_text()
        for pattern, size in ((r'^host_bytes = "8GiB"$', "8MiB"), (r'^disk_bytes = "100GiB"$', "64MiB")):
            text, count = re.subn(pattern, f'{pattern[1:11]} = "{size}"', text, flags=re.MULTILINE)
            hold(count == 1, f"{pattern} is not in the example")
        gid = grp.getgrnam("engine").gr_gid
        rule = f'[[allow]]\ngids = [{gid}]\ncaches = ["*"]\nverbs = ["read", "write", "watch", "admin"]\n'
        CONFIGURATION.write_text(f'metrics_listen = "{METRICS}"\n{text}\n{rule}')
        began = time.monotonic()
        script("start.sh")
        took = time.monotonic() - began
        hold((show("ActiveState"), show("SubState"), show("Type")) == ("active", "running", "notify"), show("SubState"))
        hold(said("kvtierd ready pid="), "the daemon does not say ready")
        return f"active after {took:.0f} s, exposure {self._exposure()}"

    def _exposure(self) -> str:
        return run("systemd-analyze", "security", "--no-pager", UNIT).strip().splitlines()[-1].split(": ")[1]

    def analyzed(self) -> str:
        """systemd-analyze verify has nothing to say of the unit"""
        lines = run("systemd-analyze", "verify", UNIT).splitlines()
        about = [line for line in lines if "kvtierd" in line]
        hold(not about, about)
        return f"{len(lines)} lines on other units"

    def status_text(self) -> str:
        """systemctl status shows the daemon's own line"""
        lines = run("systemctl", "status", UNIT).splitlines()
        found = [line.strip() for line in lines if line.strip().startswith("Status:")]
        hold(found == [f'Status: "serving at {RUNTIME}"'], lines)
        return found[0]

    def directories(self) -> str:
        """runtime and state directory are the user's, with the modes that keep others out"""
        hold(mode(RUNTIME) == (0o750, "kvtier", "kvtier"), mode(RUNTIME))
        hold(mode(STATE) == (0o700, "kvtier", "kvtier"), mode(STATE))
        sockets = {path.name: mode(path)[0] for path in RUNTIME.iterdir() if path.is_socket()}
        hold(sockets == {"attach.sock": 0o660, "kvtierd.sock": 0o660}, sockets)
        return ", ".join(sockets)

    def confined(self) -> str:
        """the hardening is in force in the process"""
        pid, status = main_pid(), status_of(main_pid())
        none = "0" * 16
        wanted = dict.fromkeys(("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"), none)
        wanted |= {"NoNewPrivs": "1", "Seccomp": "2"}
        found = {name: status[name] for name in wanted}
        hold(found == wanted, found)
        uid = str(pwd.getpwnam("kvtier").pw_uid)
        hold(status["Uid"].split() == [uid] * 4, status["Uid"])
        apart = [
            each
            for each in ("mnt", "ipc")
            if os.readlink(f"/proc/{pid}/ns/{each}") != os.readlink(f"/proc/1/ns/{each}")
        ]
        hold(apart == ["mnt", "ipc"], apart)
        mounts = {
            line.split()[4]: line.split()[5].split(",")[0]
            for line in Path(f"/proc/{pid}/mountinfo").read_text().splitlines()
        }
        hold((mounts["/"], mounts[str(STATE)], mounts[str(RUNTIME)]) == ("ro", "rw", "rw"), mounts)
        devices = sorted(path.name for path in Path(f"/proc/{pid}/root/dev").iterdir())
        hold("vda" not in devices and "mem" not in devices and "null" in devices, devices)
        return f"Seccomp_filters {status.get('Seccomp_filters', '?')}, / is read-only"

    def limits(self) -> str:
        """memory may be locked without a limit, and descriptors are many"""
        text = Path(f"/proc/{main_pid()}/limits").read_text()
        found = {
            name: re.search(rf"^{name}\s+(\S+)\s+(\S+)", text, re.MULTILINE)
            for name in ("Max locked memory", "Max open files")
        }
        values = {name: match.groups() for name, match in found.items() if match is not None}
        hold(values == {"Max locked memory": ("unlimited",) * 2, "Max open files": ("524288",) * 2}, text)
        return "unlimited and 524288"

    def host_blocks(self) -> str:
        """an allowed user attaches, and has blocks put and read in shared memory of the host tier"""
        self._engine = Engine("engine")
        put = self.engine.ask("put", "in memory", HOST_BLOCKS, "host")
        hold(put == {"mapped": True, "lookups": "shared memory"}, put)
        return self._in_memory()

    def _in_memory(self) -> str:
        """What a read of them tells, which must be that all are there and right."""
        read = self.engine.ask("read", "in memory", HOST_BLOCKS)
        hold((read["right"], read["tiers"]["host"]) == (HOST_BLOCKS, HOST_BLOCKS), read)
        return f"{HOST_BLOCKS} of {HOST_BLOCKS} blocks right in the host tier"

    def disk_blocks(self) -> str:
        """the disk tier takes blocks and gives them back, through the kernel's queue and past its cache"""
        self.engine.ask("put", "on disk", DISK_BLOCKS, "disk")
        told = self._on_disk()
        warned = [entry["MESSAGE"] for entry in journal("--priority=warning")]
        hold(not warned, warned)
        return told

    def _on_disk(self) -> str:
        read = self.engine.ask("read", "on disk", DISK_BLOCKS)
        hold((read["right"], read["tiers"]["disk"]) == (DISK_BLOCKS, DISK_BLOCKS), read)
        return f"{DISK_BLOCKS} of {DISK_BLOCKS} blocks right from disk"

    def command_line(self) -> str:
        """the command line serves whom a rule names, and nobody else"""
        listed = run("kvtier", "cache", "ls", "--json", user="engine")
        hold('"trial"' in listed, listed)
        refused = run("kvtier", "cache", "ls", user="member", status=1).strip()
        hold("no rule of the daemon's names" in refused, refused)
        kept_out = run("kvtier", "cache", "ls", user="stranger", status=1).strip()
        hold("ermission" in kept_out, kept_out)
        return f"a member without a rule: {refused!r}; a stranger: {kept_out!r}"

    def doctor(self) -> str:
        """kvtier doctor, as root, finds nothing that fails"""
        findings = json.loads(run("kvtier", "doctor", "--json", status=None))
        others = [f"{each['check']}: {each['found']}" for each in findings if each["level"] != "ok"]
        hold("fail" not in [each["level"] for each in findings], others)
        return f"{len(findings)} findings; not ok: {'; '.join(others) or 'none'}"

    def metrics(self) -> str:
        """metrics are served on this host's address, which is all that the unit lets in"""
        with urllib.request.urlopen(f"http://{METRICS}/metrics", timeout=PATIENCE_S) as answer:
            text = answer.read().decode()
        hold("kvtier_build_info" in text, text[:500])
        return f"{len(text.splitlines())} lines"

    def journal_lines(self) -> str:
        """what the daemon logs is in the journal with its priority, as fields"""
        mine = [entry for entry in journal() if entry.get("_COMM", "").startswith("kvtierd")]
        hold(len(mine) > 1, journal())
        fields = re.compile(r"time=\S+Z level=(\w+) where=kvtierd\S* \S.*")
        priority = {"debug": "7", "info": "6", "warning": "4", "error": "3"}
        for entry in mine:
            matched = fields.fullmatch(entry["MESSAGE"])
            fits = matched is not None and priority[matched[1]] == entry["PRIORITY"]
            hold(fits or entry["MESSAGE"].startswith("kvtierd ready "), entry)
        return f"{len(mine)} lines"

    def reload(self) -> str:
        """systemctl reload takes over what can change, and the status line names what cannot"""
        before, since = main_pid(), len(journal())
        text = CONFIGURATION.read_text()
        CONFIGURATION.write_text(f'log_level = "debug"\nevent_ring_bytes = 5000\n{text}')
        run("systemctl", "reload", UNIT)
        until("the status line", lambda: "event_ring_bytes has changed; that takes a restart" in show("StatusText"))
        hold((main_pid(), show("ActiveState"), show("SubState")) == (before, "active", "running"), show("SubState"))
        hold(said("Reloaded", since), messages(since))
        CONFIGURATION.write_text(text)
        run("systemctl", "reload", UNIT)
        until("the status line", lambda: show("StatusText") == f"serving at {RUNTIME}")
        return f"pid {before} stays"

    def stored(self) -> str:
        """systemd keeps the descriptors of the arenas"""
        count = int(show("NFileDescriptorStore"))
        hold(count >= 4, count)
        return f"{count} descriptors"

    def restart(self) -> str:
        """systemctl restart keeps the blocks in memory, and the client goes on"""
        before, inode = main_pid(), RUNTIME.stat().st_ino
        began = time.monotonic()
        run("systemctl", "restart", UNIT)
        took = time.monotonic() - began
        hold(serving_anew(before), show("ActiveState"))
        hold(RUNTIME.stat().st_ino == inode, "the runtime directory is another one")
        return f"{took:.0f} s, {self._in_memory()}, {self._on_disk()}"

    def killed(self) -> str:
        """after kill -9 systemd starts the daemon again, and the blocks in memory are still there"""
        before, restarts = main_pid(), int(show("NRestarts"))
        os.kill(before, signal.SIGKILL)
        took = until("another daemon", lambda: serving_anew(before))
        hold(int(show("NRestarts")) > restarts, show("NRestarts"))
        return f"after {took:.0f} s, {self._in_memory()}, {self._on_disk()}"

    def stopped_by_the_watchdog(self) -> str:
        """a daemon that stands still is killed by the watchdog and started again, with its blocks"""
        before, since = main_pid(), len(journal())
        os.kill(before, signal.SIGSTOP)
        took = until("another daemon", lambda: serving_anew(before), within=2 * PATIENCE_S)
        hold(said("Watchdog timeout", since), messages(since))
        hold(not list(Path("/var/lib/systemd/coredump").glob("*")), "there is a core")
        return f"after {took:.0f} s, {self._in_memory()}"

    def upgraded(self) -> str:
        """another version of the package and a restart: the new daemon has the old one's blocks"""
        before = self.engine.ask("about")
        since = len(journal())
        (wheel,) = (HERE / "upgrade").glob("kvtier-*.whl")
        run("/opt/kvtier/bin/pip", "install", "--no-deps", str(wheel), env=PIP)
        run("systemctl", "reset-failed", UNIT)  # five starts in five minutes are enough, and these are more
        run("systemctl", "restart", UNIT)
        after = self.engine.ask("about")
        hold(after["version"] != before["version"] and f"kvtier-{after['version']}-" in wheel.name, after)
        hold(after["boot"] == before["boot"] + 1, after)
        hold(not said("is not adopted", since), messages(since))
        return f"{before['version']} to {after['version']}, {self._in_memory()}, {self._on_disk()}"

    def stopped(self) -> str:
        """systemctl stop leaves no process, no socket, no descriptor"""
        began = time.monotonic()
        run("systemctl", "stop", UNIT)
        took = time.monotonic() - began
        hold(
            (show("ActiveState"), show("Result")) == ("inactive", "success"),
            run("systemctl", "status", UNIT, status=None),
        )
        hold(not RUNTIME.exists(), "the runtime directory is still there")
        left = run("pgrep", "-u", "kvtier", "-a", status=None)
        hold(not left, left)
        hold(int(show("NFileDescriptorStore")) == 0, show("NFileDescriptorStore"))
        return f"{took:.1f} s"

    def started_again(self) -> str:
        """after a stop and a start the blocks on disk are there, and those in memory are gone"""
        run("systemctl", "start", UNIT)
        told = self._on_disk()
        read = self.engine.ask("read", "in memory", HOST_BLOCKS)
        hold(read["tiers"]["host"] == 0, read)
        return told

    def refused(self) -> str:
        """a wrong key makes the start fail with its line and its name, once"""
        text, since = CONFIGURATION.read_text(), len(journal())
        CONFIGURATION.write_text(f'hots_bytes = "1GiB"\n{text}')
        run("systemctl", "reset-failed", UNIT)
        run("systemctl", "restart", UNIT, status=1)
        hold((show("ActiveState"), int(show("ExecMainStatus"))) == ("failed", REFUSED), show("ExecMainStatus"))
        time.sleep(10)  # ten times RestartSec=: nothing is there to be waited for
        hold((show("ActiveState"), show("NRestarts")) == ("failed", "0"), show("NRestarts"))
        errors = [str(entry["MESSAGE"]) for entry in journal("--priority=err") if entry.get("_COMM") == "kvtierd"]
        hold(len(errors) == 1 and f"{CONFIGURATION}:1: hots_bytes: " in errors[0], messages(since))
        CONFIGURATION.write_text(text)
        run("systemctl", "start", UNIT)
        hold(show("ActiveState") == "active", show("ActiveState"))
        return repr(errors[0])

    def disk_elsewhere(self) -> str:
        """a disk tier outside of the unit's own directories is refused by name, and works with the page's drop-in"""
        CONFIGURATION.write_text(f'disk_dir = "{ELSEWHERE}"\n{CONFIGURATION.read_text()}')
        since = len(journal())
        run("systemctl", "reset-failed", UNIT)
        run("systemctl", "restart", UNIT, status=1)
        run("systemctl", "stop", UNIT)
        refused = [message for message in messages(since) if str(ELSEWHERE) in message]
        hold(bool(refused), messages(since))
        script("disk.sh")
        run("systemctl", "start", UNIT)
        self._engine = Engine("engine")
        self.engine.ask("put", "on disk", DISK_BLOCKS, "disk")
        hold(any(ELSEWHERE.iterdir()), f"{ELSEWHERE} is empty")
        return f"{refused[0]!r}; then {self._on_disk()}"

    def parts(self) -> Sequence[Callable[[], str]]:
        return (
            self.versions,
            self.install,
            self.user_and_directories,
            self.start,
            self.analyzed,
            self.status_text,
            self.directories,
            self.confined,
            self.limits,
            self.host_blocks,
            self.disk_blocks,
            self.command_line,
            self.doctor,
            self.metrics,
            self.journal_lines,
            self.reload,
            self.stored,
            self.restart,
            self.killed,
            self.stopped_by_the_watchdog,
            self.upgraded,
            self.stopped,
            self.started_again,
            self.refused,
            self.disk_elsewhere,
        )


def main() -> None:
    good = bad = 0
    for part in Trial().parts():
        name = " ".join((part.__doc__ or "").split())
        try:
            told = part()
        except Exception as error:  # noqa: BLE001  told, and the parts after it are still worth a try
            bad += 1
            why = str(error) if isinstance(error, Failed) else traceback.format_exc()
            print(f"failed: {name}: {why}", flush=True)
        else:
            good += 1
            print(f"ok: {name} ({told})", flush=True)
    if bad:
        print(run("journalctl", "--unit", UNIT, "--no-pager", "--lines=300", status=None))
    print(f"systemd-vm: {good} ok, {bad} failed", flush=True)


if __name__ == "__main__":
    main()
