"""Runs kvtierd's unit under a real systemd: a Debian 12 in a virtual machine without a network.

As root on Debian; installs QEMU and mmdebstrap with apt where they are missing. Everything that it makes is in .vm, and
the guest's console stays there.
"""

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

from debian import make_root, reason_to_skip, run

ROOT: Final = Path(__file__).resolve().parent.parent
WORK: Final = ROOT / ".vm"
TOOLS: Final = {"qemu-system-x86_64": "qemu-system-x86", "mmdebstrap": "mmdebstrap", "mke2fs": "e2fsprogs"}
"""By command, the package of Debian that has it."""
GUEST: Final = (
    *("dbus", "initramfs-tools", "kmod", "linux-image-cloud-amd64", "passwd", "procps"),
    *("python3", "python3-venv", "systemd-sysv"),
)
GUEST_ENVIRONMENT: Final = (
    "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    *("PIP_NO_INDEX=1", "PIP_FIND_LINKS=/trial/wheels", "PIP_ROOT_USER_ACTION=ignore"),
)
BLOCKS: Final = ("package.sh", "files.sh", "start.sh")
"""Names for the first blocks of commands in docs/operations.md. The first is run while the disk is made, for speed."""
LIMIT_S: Final = 5400.0
MACHINE: Final = ("-accel", "tcg,thread=multi", "-cpu", "max", "-smp", "2", "-m", "2G")
"""Emulated everywhere: a KVM inside a virtual machine may refuse the processor's registers."""
CMDLINE: Final = "root=/dev/vda rw console=ttyS0 panic=-1 no_timer_check"
"""On a busy machine an emulated timer may be too late for the kernel's test of it, which then panics."""
UNIT: Final = """\
[Unit]
SuccessAction=poweroff-force
FailureAction=poweroff-force
[Service]
Type=exec
ExecStart=/opt/kvtier/bin/python -m pytest -v --color=no -p no:cacheprovider /trial/systemd_guest.py
ExecStopPost=sh -c 'test $SERVICE_RESULT = success || journalctl --unit kvtierd.service --no-pager --lines=300'
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


def blocks() -> dict[str, str]:
    """The first blocks of commands under 'Install as a service' in docs/operations.md, by the name they have here."""
    section = (ROOT / "docs" / "operations.md").read_text().partition("## Install as a service\n")[2]
    found = re.findall(r"^```sh \S+\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    texts = [text.replace("'.[daemon]'", "'kvtier[daemon]'") for text in found]  # the guest has wheels, and no clone
    return dict(zip(BLOCKS, texts, strict=False))


def disk() -> Path:
    """The guest's disk, with the package installed as the page says, and the trial in /trial."""
    tree, image = WORK / "tree", WORK / "disk"
    trial = tree / "trial"
    make_root(tree, *GUEST)
    constraints = ROOT / "constraints-dev.txt"
    wheels = [f"{ROOT}[daemon]", "pytest"]
    run(sys.executable, "-m", "pip", "wheel", "-q", "-c", constraints, "-w", trial / "wheels", *wheels)
    shutil.copy(ROOT / ".ci" / "systemd_guest.py", trial)
    for name, text in blocks().items():
        (trial / name).write_text(text)
    run("chroot", tree, "env", "-i", *GUEST_ENVIRONMENT, "sh", "-eu", f"/trial/{BLOCKS[0]}")
    run("chroot", tree, "env", "-i", *GUEST_ENVIRONMENT, "/opt/kvtier/bin/pip", "install", "-q", "pytest")
    (tree / "etc/systemd/system/trial.service").write_text(UNIT)
    run("chroot", tree, "systemctl", "enable", "-q", "trial.service")
    run("chroot", tree, "systemctl", "mask", "-q", *MASKED)
    (tree / "etc/fstab").unlink(missing_ok=True)
    run("mke2fs", "-q", "-t", "ext4", "-d", tree, image, "3G")
    return image


def boot(image: Path) -> str:
    """What the guest printed until it was switched off, shown as it comes."""
    console, result = WORK / "console.txt", WORK / "result.txt"
    result.touch()
    (kernel,) = (WORK / "tree/boot").glob("vmlinuz-*")
    (initrd,) = (WORK / "tree/boot").glob("initrd.img-*")
    command = ["nice", "-n", "10", "qemu-system-x86_64", *MACHINE, "-display", "none", "-monitor", "none"]
    command += ["-nic", "none", "-no-reboot", "-device", "virtio-rng-pci"]
    command += ["-serial", f"file:{console}", "-serial", f"file:{result}"]
    command += ["-kernel", str(kernel), "-initrd", str(initrd)]
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


def main() -> int:
    if why := reason_to_skip(TOOLS):
        print(f"systemd-vm: skipped: {why}")
        return 0
    shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir()
    os.environ["TMPDIR"] = str(WORK)
    printed = boot(disk())
    shutil.rmtree(WORK / "tree")
    (WORK / "disk").unlink()
    if re.search(r"^=+ [1-9]\d* passed in ", printed, re.MULTILINE):
        return 0
    print(f"systemd-vm: failed; see {WORK / 'console.txt'}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
