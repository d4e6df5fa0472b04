"""Debian's tools and root file systems, for the checks that need a clean Debian 12."""

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path


def run(*command: str | Path) -> None:
    subprocess.run(list(map(str, command)), check=True, stdin=subprocess.DEVNULL)


def reason_to_skip(tools: Mapping[str, str]) -> str:
    """Why a Debian cannot be made here; empty if it can, once the missing tools are installed.

    Args:
        tools: By command, the package of Debian that has it.
    """
    if sys.platform != "linux" or platform.machine() != "x86_64" or sys.version_info[:2] != (3, 11):
        return "it needs an x86-64 Linux and Python 3.11, as Debian 12 has them"
    if os.getuid() != 0:
        return "only root can make its root file system"
    wanted = [package for command, package in tools.items() if shutil.which(command) is None]
    if wanted and shutil.which("apt-get") is None:
        return f"there is no apt-get to install {' '.join(wanted)} with"
    if wanted:
        run("apt-get", "-qq", "update")
        run("env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "-qqy", "install", "--no-install-recommends", *wanted)
    return ""


def make_root(target: Path, *packages: str) -> None:
    """A Debian 12 with these packages, as a directory or, where the name ends so, a tar file."""
    options = ["--quiet", "--variant=minbase", "--dpkgopt=force-unsafe-io", f"--include={','.join(packages)}"]
    run("mmdebstrap", *options, "bookworm", target)
