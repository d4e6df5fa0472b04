"""A network between this host and processes in a namespace of their own, which a test can cut in silence."""

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import pytest


@dataclass(slots=True, frozen=True)
class Network:
    """``address``: of the namespace, from here. ``inside``: what a command begins with that runs there."""

    name: str
    address: str

    @property
    def inside(self) -> Sequence[str]:
        return ("ip", "netns", "exec", self.name)

    def cut(self) -> None:
        """No packet passes, and nobody is told. Those inside still reach each other."""
        _ip("-n", self.name, "link", "set", self.name, "down")

    def mend(self) -> None:
        _ip("-n", self.name, "link", "set", self.name, "up")


@contextmanager
def network() -> Iterator[Network]:
    """Skips the test where this process may not make one."""
    number = os.getpid() % 250
    name, far = f"kv-net{number}", f"kv-far{number}"
    try:
        _ip("netns", "add", name)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("a network namespace needs root and iproute2")
    try:
        _ip("link", "add", far, "type", "veth", "peer", "name", name, "netns", name)
        _ip("address", "add", f"10.214.{number}.1/30", "dev", far)
        _ip("link", "set", far, "up")
        _ip("-n", name, "address", "add", f"10.214.{number}.2/30", "dev", name)
        for link in ("lo", name):
            _ip("-n", name, "link", "set", link, "up")
        yield Network(name, f"10.214.{number}.2")
    finally:
        _ip("netns", "delete", name)  # and with it both ends of the pair


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
