"""Hosts that share nothing but the way to a store: network namespaces of this machine, and daemons in them."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

import pytest

from kvtier import Tier
from tests.integration.daemon import DaemonProcess

STORE: Final = "10.213.1.1"
"""An address that every host reaches, of the machine itself."""


@dataclass(frozen=True)
class Host:
    """``within``: what runs a command there."""

    name: str

    @property
    def within(self) -> list[str]:
        return ["nsenter", f"--net=/run/netns/{self.name}"]


@contextmanager
def hosts(count: int) -> Iterator[list[Host]]:
    """Skips where namespaces are not permitted."""
    if os.geteuid() != 0 or not all(map(shutil.which, ("ip", "nsenter"))):
        pytest.skip("network namespaces need root, ip and nsenter")
    with ExitStack() as stack:
        yield [stack.enter_context(_host(number)) for number in range(1, count + 1)]


@contextmanager
def _host(number: int) -> Iterator[Host]:
    name, link, net = f"kv-{os.getpid()}-{number}", f"kv{os.getpid()}n{number}", f"10.213.{number}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode:
        pytest.skip(f"no network namespaces here: {made.stderr.strip()}")
    try:
        _ip(f"link add {link} type veth peer name eth0 netns {name}")
        _ip(f"addr add {net}.1/30 dev {link}")
        _ip(f"link set {link} up")
        _ip(f"-n {name} addr add {net}.2/30 dev eth0")
        _ip(f"-n {name} link set lo up")
        _ip(f"-n {name} link set eth0 up")
        _ip(f"-n {name} route add default via {net}.1")
        yield Host(name)
    finally:
        subprocess.run(["ip", "link", "del", link], capture_output=True, check=False)
        _ip(f"netns del {name}")


def _ip(arguments: str) -> None:
    subprocess.run(["ip", *arguments.split()], check=True)


@contextmanager
def daemon_on(
    host: Host | None,
    sizes: Mapping[Tier, int],
    flags: list[str],
    variables: Mapping[str, str] = MappingProxyType({}),
    program: Sequence[str] = ("kvtierd.main",),
) -> Iterator[DaemonProcess]:
    """With a state of its own; ``host`` None: on this machine."""
    home = Path(tempfile.mkdtemp(prefix="kv-"))
    daemon = DaemonProcess(home, sizes, flags)
    daemon.within = [] if host is None else host.within
    daemon.variables.update(variables)
    daemon.program = [*program]
    daemon.start()
    try:
        yield daemon
    finally:
        daemon.stop()
        shutil.rmtree(home)
