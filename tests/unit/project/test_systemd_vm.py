"""``make systemd-vm``: what of it can be told without a virtual machine."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import systemd_guest
import systemd_vm

ROOT = Path(__file__).resolve().parents[3]


def test_where_a_guest_cannot_be_made_a_line_says_why(tmp_path: Path) -> None:
    """No command is to be found, so no apt-get either."""
    work = tmp_path / "work"
    command = [sys.executable, str(ROOT / ".ci" / "systemd_vm.py"), str(work)]
    ended = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=60, env={"PATH": str(tmp_path)}
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert re.fullmatch(r"systemd-vm: skipped: .+\n", ended.stdout)
    assert not work.exists()


def test_the_guest_types_what_the_documentation_says() -> None:
    package, files, start, disk = systemd_vm.blocks()
    named = re.findall(r"(?<= )systemd/\S+", files)
    assert named and all((ROOT / name).is_file() for name in named)
    (program,) = re.findall(r"^ExecStart=(\S+)", (ROOT / "systemd" / "kvtierd.service").read_text(), re.MULTILINE)
    assert program == "/usr/bin/kvtierd"
    assert re.search(r"^ln -s .*/kvtierd /usr/bin/$", package, re.MULTILINE)
    assert "enable --now kvtierd" in start
    assert f"ReadWritePaths={systemd_guest.ELSEWHERE}\\n" in disk


def test_every_part_of_the_trial_says_what_it_shows() -> None:
    names = [part.__doc__ for part in systemd_guest.Trial().parts()]
    assert all(names) and len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("printed", "counts"),
    [
        ("ok: it starts (12 s)\nsystemd-vm: 1 ok, 0 failed\n", (1, 0)),
        ("ok: it starts (12 s)\nfailed: it stops: no\nsystemd-vm: 1 ok, 1 failed\n", (1, 1)),
        ("ok: it starts (12 s)\n", None),
    ],
)
def test_a_trial_counts_only_once_the_guest_has_come_to_its_end(printed: str, counts: tuple[int, int] | None) -> None:
    assert systemd_vm.verdict(printed) == counts
