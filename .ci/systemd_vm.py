"""Runs kvtierd's unit under a real systemd: a Debian 12 in a virtual machine, without a network, gone afterwards.

``systemd_vm.py [DIRECTORY]``: does all its own set-up with apt, as root, and keeps the guest's system in DIRECTORY
(.vm) for the next time. Emulates a processor, which takes a while. Boots nothing but the virtual machine.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
PAGE: Final = ROOT / "docs" / "operations.md"
TOOLS: Final = {"qemu-system-x86_64": "qemu-system-x86", "mmdebstrap": "mmdebstrap", "mke2fs": "e2fsprogs"}
"""By command, the package of Debian that has it."""
GUEST: Final = (
    *("dbus", "initramfs-tools", "kmod", "linux-image-cloud-amd64", "passwd", "procps"),
    *("python3", "python3-venv", "systemd-sysv"),
)
GUEST_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
IMAGE_SIZE: Final = "3G"
BLOCKS: Final = ("package.sh", "files.sh", "start.sh", "disk.sh")
"""What the commands of docs/operations.md are called here. The first are typed while the disk is made, for speed."""
LIMIT_S: Final = 5400.0
"""Of one boot with all its parts."""
EMULATED: Final = ("-accel", "tcg,thread=multi", "-cpu", "max", "-smp", "2", "-m", "2G")
"""Everywhere the same, whether the machine has KVM or not."""
CMDLINE: Final = "root=/dev/vda rw console=ttyS0 panic=-1 no_timer_check"
"""On a busy machine an emulated timer may be too late for the kernel's test of it, which then panics."""
UNIT: Final = """\
[Unit]
SuccessAction=poweroff-force
FailureAction=poweroff-force
[Service]
Type=exec
ExecStart=/usr/bin/python3 /trial/systemd_guest.py
StandardOutput=tty
StandardError=inherit
TTYPath=/dev/ttyS1
[Install]
WantedBy=multi-user.target
"""
MASKED: Final = (
    *("apt-daily.timer", "apt-daily-upgrade.timer", "dpkg-db-backup.timer", "e2scrub_all.timer", "fstrim.timer"),
    *("e2scrub_reap.service", "systemd-timesyncd.service", "systemd-update-utmp-runlevel.service"),
    *("getty@.service", "serial-getty@.service", "systemd-logind.service", "systemd-udev-trigger.service"),
)
"""Units that have nothing to do with the trial and take an emulated processor minutes."""

_LAST: Final = re.compile(r"^systemd-vm: (\d+) ok, (\d+) failed\r?$", re.MULTILINE)


def skipped() -> str:
    """Why it cannot be run here; empty where it can, once what it needs is installed."""
    if sys.platform != "linux" or os.uname().machine != "x86_64":
        return "the guest is an x86-64 Linux, and so must this machine be"
    if os.getuid() != 0:
        return "only root can make the guest's system"
    wanted = [package for command, package in TOOLS.items() if shutil.which(command) is None]
    if not wanted:
        return ""
    if shutil.which("apt-get") is None:
        return f"there is no apt-get to install {' '.join(wanted)} with"
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    for command in (["update"], ["install", "-y", "--no-install-recommends", *wanted]):
        asked = ["apt-get", "-q", *command]
        if subprocess.run(asked, check=False, stdout=subprocess.DEVNULL, env=environment).returncode:
            return f"apt-get {command[0]} failed, and {' '.join(wanted)} is wanted"
    return ""


def run(*command: str | Path) -> None:
    """Raises CalledProcessError, with what it said before that on standard error."""
    subprocess.run([str(part) for part in command], check=True, stdin=subprocess.DEVNULL)


def needed() -> list[str]:
    """Requirements of the daemon and its client."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [*project["dependencies"], *project["optional-dependencies"]["daemon"]]


def system(work: Path) -> Path:
    """A directory with the guest's ``tree``, ``vmlinuz`` and ``initrd``, made once for what it is made of."""
    constraints = ROOT / "constraints-dev.txt"
    recipe = "\n".join([*GUEST, *needed(), constraints.read_text(), UNIT, *MASKED])
    made = work / f"system-{hashlib.sha256(recipe.encode()).hexdigest()[:12]}"
    if made.exists():
        return made
    for old in work.glob("system-*"):
        shutil.rmtree(old)
    with tempfile.TemporaryDirectory(prefix="making-", dir=work) as directory:
        done = Path(directory) / "done"
        done.mkdir()
        tree = done / "tree"
        os.environ["TMPDIR"] = directory
        options = ["--quiet", "--variant=minbase", "--dpkgopt=force-unsafe-io", f"--include={','.join(GUEST)}"]
        run("mmdebstrap", *options, "bookworm", tree)
        pip = [sys.executable, "-m", "pip", "download", "-q", "--only-binary=:all:", "--python-version=3.11"]
        run(*pip, "-c", constraints, "-d", tree / "trial" / "wheels", *needed())
        (tree / "etc/systemd/system/trial.service").write_text(UNIT)
        run("chroot", tree, "systemctl", "enable", "-q", "trial.service")
        run("chroot", tree, "systemctl", "mask", "-q", *MASKED)
        (tree / "etc/fstab").unlink(missing_ok=True)
        for name in ("vmlinuz", "initrd.img"):
            (found,) = (tree / "boot").glob(f"{name}-*")
            shutil.copyfile(found, done / name)
        done.rename(made)
    return made


def blocks() -> list[str]:
    """The blocks of the page's first section: the package, the files of the unit, the start, a disk."""
    section = PAGE.read_text().partition("## Install as a service\n")[2].partition("\n## ")[0]
    found = re.findall(r"^```sh by-hand\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    if len(found) != len(BLOCKS):
        sys.exit(
            f"systemd-vm: {len(found)} blocks of commands under 'Install as a service' of {PAGE}, not {len(BLOCKS)}"
        )
    return [text.replace("'.[daemon]'", "'kvtier[daemon]'") for text in found]  # the guest has wheels, and no clone


def wheel(into: Path, version: str, scratch: Path) -> None:
    """Builds the tree as it is, under another version."""
    source = scratch / version
    for part in ("client", "daemon"):
        shutil.copytree(ROOT / part, source / part, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    text, count = re.subn(
        r'^version = ".*"$', f'version = "{version}"', (ROOT / "pyproject.toml").read_text(), flags=re.M
    )
    if count != 1:
        sys.exit(f"systemd-vm: pyproject.toml has {count} versions, not 1")
    (source / "pyproject.toml").write_text(text)
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", into, source)


def disk(made: Path, work: Path) -> Path:
    """The guest's disk: its system, with the package installed as the page says, and what is to be tried in /trial."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    tree, trial, image = made / "tree", made / "tree" / "trial", work / "disk"
    for old in trial.iterdir():
        if old.name != "wheels":
            shutil.rmtree(old) if old.is_dir() else old.unlink()
    for old in [*(trial / "wheels").glob("kvtier-*"), *(tree / "usr/bin").glob("kvtier*")]:
        old.unlink()
    shutil.rmtree(tree / "opt/kvtier", ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="building-", dir=work) as directory:
        wheel(trial / "wheels", version, Path(directory))
        wheel(trial / "upgrade", f"{version}.post1", Path(directory))
    shutil.copytree(ROOT / "systemd", trial / "systemd")
    for name in ("systemd_guest.py", "systemd_engine.py"):
        shutil.copy(ROOT / ".ci" / name, trial)
    for name, text in zip(BLOCKS, blocks(), strict=True):
        (trial / name).write_text(text)
    offline = ["PIP_NO_INDEX=1", "PIP_FIND_LINKS=/trial/wheels", "PIP_ROOT_USER_ACTION=ignore", "PIP_QUIET=1"]
    run("chroot", tree, "env", "-i", f"PATH={GUEST_PATH}", *offline, "sh", "-eu", f"/trial/{BLOCKS[0]}")
    image.unlink(missing_ok=True)
    run("mke2fs", "-q", "-t", "ext4", "-d", tree, image, IMAGE_SIZE)
    return image


def boot(made: Path, image: Path, work: Path) -> str:
    """What the guest printed until it was switched off, shown as it comes."""
    console, result = work / "console.txt", work / "result.txt"
    result.write_text("")
    command = ["nice", "-n", "10", "qemu-system-x86_64", *EMULATED, "-display", "none", "-monitor", "none"]
    command += ["-nic", "none", "-no-reboot", "-device", "virtio-rng-pci"]
    command += ["-serial", f"file:{console}", "-serial", f"file:{result}"]
    command += ["-kernel", str(made / "vmlinuz"), "-initrd", str(made / "initrd.img")]
    command += ["-append", CMDLINE, "-drive", f"file={image},format=raw,if=virtio"]
    until = time.monotonic() + LIMIT_S
    with subprocess.Popen(command, stdin=subprocess.DEVNULL) as machine, result.open() as lines:
        try:
            while machine.poll() is None and time.monotonic() < until:
                time.sleep(1)
                print(lines.read(), end="", flush=True)
        finally:
            machine.kill()
        print(lines.read(), end="", flush=True)
    return result.read_text()


def verdict(printed: str) -> tuple[int, int] | None:
    """How many parts went well, and how many did not; None: the guest did not come to its end."""
    last = _LAST.search(printed)
    return (int(last[1]), int(last[2])) if last else None


def main() -> int:
    if why := skipped():
        print(f"systemd-vm: skipped: {why}")
        return 0
    work = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / ".vm").resolve()
    work.mkdir(parents=True, exist_ok=True)
    try:
        made = system(work)
        printed = boot(made, disk(made, work), work)
    except subprocess.CalledProcessError as error:
        print(f"systemd-vm: could not be set up: {error}", file=sys.stderr)
        return 1
    counted = verdict(printed)
    if counted is None:
        print(f"systemd-vm: the guest did not come to its end; see {work / 'console.txt'}", file=sys.stderr)
        return 1
    good, bad = counted
    return 1 if bad or not good else 0


if __name__ == "__main__":
    sys.exit(main())
