"""What of `make systemd-vm` can be shown without a virtual machine."""

import re
import subprocess
import sys
from pathlib import Path

import systemd_vm

ROOT = Path(__file__).resolve().parents[3]


def test_where_a_guest_cannot_be_made_a_line_says_why():
    """No command can be found, not even apt-get."""
    command = [sys.executable, str(ROOT / ".ci" / "systemd_vm.py")]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, env={"PATH": "/nowhere"})
    assert (ended.returncode, ended.stderr) == (0, "")
    assert re.fullmatch(r"systemd-vm: skipped: .+\n", ended.stdout)


def test_the_guest_types_what_the_documentation_says():
    blocks = systemd_vm.blocks()
    assert "install-service --yes" in blocks["files.sh"]
    assert re.search(r"^ln -s .*/kvtierd /usr/bin/$", blocks["package.sh"], re.MULTILINE)
    assert "enable --now kvtierd" in blocks["start.sh"]
