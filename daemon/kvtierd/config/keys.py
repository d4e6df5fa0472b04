"""Every key of the configuration: its type, default, limits and description."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    TypeAdapter,
    model_validator,
)
from pydantic_core import from_json
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from kvtier.abi.attach import ATTACH_SOCKET, DEFAULT_ADDRESS, socket_path
from kvtier.abi.cuda.opening import is_device_name
from kvtierd.core.ids import Tier
from kvtierd.core.policy import DEFAULT_THRESHOLD, MAX_PRIORITY, NEVER, Policy, RemotePolicy, RemoteWrites, WriteMode
from kvtierd.rights import AllowRule
from kvtierd.tcp import ServerTlsFiles, TcpListener, host_and_port
from kvtierd.tiers.remote import urls

ENV_PREFIX: Final = "KVTIERD_"
LIVE: Final = frozenset({"allow", "log_level"})
"""Keys that a reload changes at once. Every other key waits for a restart."""
SECTIONS: Final = {
    "runtime_dir": "Directories",
    "device": "Tiers",
    "allow": "Clients",
    "listen_tcp": "TCP and peers",
    "max_reserved_fraction": "Policy and times",
    "event_ring_bytes": "Events",
    "metrics_listen": "Metrics, logs and checks",
}
"""Titles over the keys in the help, each by the first key under it."""
STAND_IN: Final = "stand-in"

_MAX_TIER_BYTES: Final = 1 << 50
_MAX_PEERS: Final = 64
_PAGE: Final = 4096
_SIZE: Final = re.compile(r"\s*\d*\.?\d+\s*[a-z]*\s*", re.IGNORECASE | re.ASCII)
_PERCENT: Final = re.compile(r"\s*(\d{1,3}(?:\.\d+)?)\s*%\s*")


class Share(float):
    """A share of some bytes: above 0, at most 1."""

    def of(self, nbytes: int) -> int:
        """The share of ``nbytes``, in bytes."""
        return int(nbytes * self)

    def __str__(self) -> str:
        return f"{self * 100:.10g}%"


def _size(value: object) -> object:
    """Refuses text that :class:`ByteSize` would misread, like ``80%``."""
    if not _SIZE.fullmatch(str(value)):
        raise ValueError("must be bytes, 0 or more, or text such as 8GiB")
    return value


def _share(value: object) -> Share:
    if isinstance(value, Share):
        return value
    percent = _PERCENT.fullmatch(value) if isinstance(value, str) else None
    share = Share(float(percent[1]) / 100 if percent else 0)
    if not 0 < share <= 1:
        raise ValueError("must be above 0% to 100%")
    return share


def _size_or_share(value: object) -> ByteSize | Share:
    is_share = isinstance(value, Share) or (isinstance(value, str) and _PERCENT.fullmatch(value))
    return _share(value) if is_share else _SOME_BYTES.validate_python(value)


def _some_pages(size: ByteSize) -> ByteSize:
    """Refuses a size below a page: its unit was probably forgotten."""
    if 0 < size < _PAGE:
        raise ValueError(
            f"must be 0, or {_PAGE} bytes or more, the least that a slot has; text such as 8GiB has a unit"
        )
    return size


def _path(value: object) -> object:
    """Refuses an empty path, which would be the working directory."""
    if value == "":
        raise ValueError("must not be empty")
    return value


def _device(name: str) -> str:
    if name != STAND_IN and not is_device_name(name):
        raise ValueError("must be stand-in, cuda, cuda:<number> or GPU-<uuid> as nvidia-smi -L shows it")
    return name


def _peer_address(address: str) -> str:
    try:
        _, port = host_and_port("address", address)
    except ValueError:
        port = 0
    if not port:
        raise ValueError("must be host:port, or [host]:port for IPv6, with the port that the peer listens on")
    return address


def _collector(url: str) -> str:
    found = re.fullmatch(r"https?://[^/@]+:(\d{1,5})", url)
    if found is None or not 0 < int(found[1]) < 1 << 16:
        raise ValueError("must be http://host:port or, with TLS, https://host:port")
    return url


def _runtime_dir(path: Path) -> Path:
    socket_path(path, ATTACH_SOCKET)  # raises ValueError for a path that is too long for a socket
    return path


def _table(value: object) -> object:
    """Decodes a table: the environment has JSON, or the text of the flag."""
    return from_json(value) if isinstance(value, str) and value.startswith("{") else value


def _listed(value: object) -> object:
    """Decodes a list: the environment has JSON."""
    return from_json(value) if isinstance(value, str) else value


FilePath = Annotated[Path, BeforeValidator(_path)]
OptionalPath = Annotated[Path | None, BeforeValidator(_path)]
Size = Annotated[ByteSize, BeforeValidator(_size)]
TierShare = Annotated[Share, PlainValidator(_share), PlainSerializer(str)]
TierBytes = Annotated[Size, Field(ge=0, le=_MAX_TIER_BYTES), AfterValidator(_some_pages)]
DeviceBytes = Annotated[
    ByteSize | Share,
    PlainValidator(_size_or_share),
    PlainSerializer(lambda size: str(size) if isinstance(size, Share) else int(size)),
]
_SOME_BYTES: Final[TypeAdapter[ByteSize]] = TypeAdapter(Annotated[Size, Field(gt=0, le=_MAX_TIER_BYTES)])


class DeviceConfig(BaseModel):
    """A ``[[device]]`` table; ``NAME=BYTES`` as a flag or as an element in the environment."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Annotated[str, AfterValidator(_device)] = Field(
        description="`cuda`, `cuda:1` or `GPU-<uuid>`, each GPU once, or `stand-in` for shared memory."
    )
    bytes: DeviceBytes = Field(
        description="Size of the device tiers, or on a GPU a share of the free memory, for example `80%`."
    )

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        name, _, nbytes = value.partition("=")
        return {"name": name, "bytes": nbytes}

    @model_validator(mode="after")
    def _in_bytes(self) -> Self:
        if isinstance(self.bytes, Share) and self.name == STAND_IN:
            raise ValueError("bytes must be a size, unless name is a GPU such as cuda")
        return self

    def __str__(self) -> str:
        return f"{self.name}={self.bytes}"


class RemoteConfig(BaseModel):
    """The ``[remote]`` table; as a flag its URL alone."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    url: Annotated[str, AfterValidator(urls.check), PlainSerializer(urls.shown)] = Field(
        description="`s3://bucket/prefix`, `gs://…`, `az://…`, `file:///directory` or `mooncake://…`."
    )
    write: RemotePolicy = Field(
        RemotePolicy.EVICT,
        description="Time of writes: before the block leaves the lowest tier, at the second use, or at once.",
    )
    min_priority: int = Field(0, ge=0, le=MAX_PRIORITY, description="Lowest effective priority that is written.")
    first_tokens: int = Field(0, ge=0, description="First tokens of a prompt whose blocks are written; 0 = all.")
    ahead: float = Field(0.05, gt=0, le=1, description="Share of the lowest tier that `evict` writes ahead of need.")
    bytes_per_second: Annotated[Size, Field(ge=0)] = Field(ByteSize(0), description="Limit of writes; 0 = none.")
    timeout_seconds: float = Field(5.0, gt=0, le=600, description="Time limit of a store call.")
    group_access: bool = Field(False, description="Let the group of a shared directory read and write the objects.")

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        return {"url": value} if isinstance(value, str) else value

    def __str__(self) -> str:
        return urls.shown(self.url)

    @property
    def writes(self) -> RemoteWrites:
        """The core's form of these settings."""
        return RemoteWrites(self.write, self.min_priority, self.first_tokens, self.ahead)


class PeerConfig(BaseModel):
    """A ``[[peers]]`` table; ``HOST:PORT`` as a flag or as an element in the environment."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    address: Annotated[str, AfterValidator(_peer_address)] = Field(
        description="host:port of the peer's `listen_tcp`, as its certificate names it."
    )

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        return {"address": value} if isinstance(value, str) else value


class Config(BaseSettings):
    """All keys. :func:`kvtierd.config.load.read` fills them from all sources."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, extra="forbid", frozen=True)

    runtime_dir: Annotated[FilePath, AfterValidator(_runtime_dir)] = Field(
        Path(DEFAULT_ADDRESS), description="Directory of the sockets, and address of the daemon."
    )
    state_dir: FilePath = Field(Path("/var/lib/kvtier"), description="Directory of epoch, event log and cache budgets.")
    disk_dir: OptionalPath = Field(
        None, description="Directory of the disk tier; by default `disk` in the state directory."
    )

    device: Annotated[tuple[DeviceConfig, ...], NoDecode, BeforeValidator(_listed)] = Field(
        (), description="Devices with a device tier. As a flag `NAME=BYTES`: `--device cuda:1=80%`."
    )
    host_bytes: TierBytes = Field(
        ByteSize(0), description="Size of the host tier. At least one tier must have a size above 0."
    )
    disk_bytes: TierBytes = Field(ByteSize(0), description="Size of the disk tier.")
    default_budget: TierShare = Field(
        Share(0.25), description="Share of each tier for a cache that is opened without budgets; less if less is left."
    )
    sync: Literal["batch", "commit"] = Field(
        "batch",
        description="Loss at a power cut: each cache's last disk transaction, or with `commit` none, for one more "
        "write each.",
    )
    remote: Annotated[RemoteConfig | None, NoDecode, BeforeValidator(_table)] = Field(
        None, description="Slower store shared by hosts (S3, GCS, a directory), used below this host's tiers."
    )

    allow: Annotated[tuple[AllowRule, ...], NoDecode, BeforeValidator(_listed)] = Field(
        (), description="Rights of clients other than root and the daemon's user."
    )
    max_sessions: int = Field(
        1024, ge=1, le=65536, description="Number of sessions; one user or certificate may have half."
    )

    listen_tcp: str | None = Field(
        None, description="host:port for TCP clients; port 0 takes a free port. Needs the TLS files, or `tcp_insecure`."
    )
    tls_cert: OptionalPath = Field(None, description="Certificate chain of the daemon, PEM.")
    tls_key: OptionalPath = Field(None, description="Private key of the daemon, PEM.")
    tls_client_ca: OptionalPath = Field(None, description="Authorities for certificates of clients and peers, PEM.")
    tcp_insecure: bool = Field(False, description="No TLS, on loopback only. Every client is `anonymous`.")
    tcp_grace_seconds: float = Field(
        30.0, ge=0, le=3600, description="Time to resume a session whose connection broke."
    )

    peers: Annotated[tuple[PeerConfig, ...], NoDecode, BeforeValidator(_listed), Field(max_length=_MAX_PEERS)] = Field(
        (),
        description="Daemons to follow, at most 64; this daemon skips itself. Needs the TLS files, or `tcp_insecure`. "
        "As a flag `HOST:PORT`.",
    )

    max_reserved_fraction: float = Field(
        0.9,
        gt=0,
        le=1,
        description="Share of a tier's slots per window group that one session may hold reserved; 1 can block reads "
        "from disk.",
    )
    tier_grace_seconds: float = Field(
        30.0,
        ge=0.01,
        le=86400,
        description="Time until the blocks on a failing disk are lost. A disk that works again begins empty.",
    )

    write_policy: WriteMode = Field(
        WriteMode.BACK,
        description="Time of copies down: when the slot is needed, at once, or at the second use. A cache can "
        "override this key and the next four.",
    )
    eviction: Literal["learned", "lru", "lfuda"] = Field(
        "learned", description="Order of eviction within a priority. lfuda is an older name of learned."
    )
    event_hash: Literal["", "v1_block_key", "v2_sha256", "v2_sha256_64"] = Field(
        "", description="Extra hashes in events, for TensorRT-LLM routers."
    )
    keep_tokens: bool = Field(
        False, description="Keep token ids with blocks, for events. A cache can only turn this on."
    )
    demotion_threshold: int = Field(
        DEFAULT_THRESHOLD,
        ge=0,
        le=NEVER,
        description="Lowest effective priority that moves to a lower tier; 0 = always, 101 = never.",
    )

    wait_seconds: float = Field(30.0, gt=0, le=3600, description="Default wait of a call for room in a tier.")
    transfer_idle_seconds: float = Field(
        30.0,
        ge=0.01,
        le=3600,
        description="Time in which a put stream must bring 64 KiB, and a get stream must have a message taken.",
    )
    shutdown_seconds: float = Field(30.0, gt=0, le=3600, description="Time for moves at a clean stop.")

    event_ring_bytes: Annotated[Size, Field(ge=1 << 10, le=1 << 36)] = Field(
        ByteSize(16 << 20), description="Memory for past events."
    )
    event_log_bytes: Annotated[Size, Field(ge=0, le=1 << 40)] = Field(
        ByteSize(256 << 20), description="Disk space for past events, for watchers after restarts; 0 = none."
    )

    metrics_listen: str | None = Field(
        None, description="host:port of Prometheus metrics, readable without rights; port 0 takes a free port."
    )
    metrics_page: bool = Field(True, description="Serve a page of the daemon's state at `/` of that port.")
    traces: Annotated[str, AfterValidator(_collector)] | None = Field(
        None, description="OTLP collector for spans, for example http://127.0.0.1:4317. Needs the extra `otel`."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Lowest logged level.")
    debug_checks: bool = Field(False, description="Check all core invariants after every step. Slow.")
    chaos_seed: int | None = Field(
        None, ge=0, description="For tests: the stand-in completes copies late and out of order."
    )

    @model_validator(mode="after")
    def _without_conflicts(self) -> Self:
        if conflicts := list(self._conflicts()):
            raise ValueError("\n".join(conflicts))
        return self

    def _conflicts(self) -> Iterator[str]:
        """Faults in the combination of keys. Each message begins with the key to change."""
        if not self.tiers:
            yield "no tier is configured: give a device, or set host_bytes or disk_bytes above 0"
        seen: dict[Path, str] = {}
        for name, path in (
            ("runtime_dir", self.runtime_dir),
            ("state_dir", self.state_dir),
            ("the event log's", self.state_dir / "events"),
            ("disk_dir", self.disk_path),
        ):
            other = seen.setdefault(path.absolute(), name)
            if other != name:
                yield f"{name} = {str(path)!r}: must not be {other}, which is the same directory"
        if self.remote is not None and Tier.HOST not in self.tiers:
            yield f"remote = {str(self.remote)!r}: needs host_bytes above 0, for what comes from there"
        for address, times in Counter(peer.address for peer in self.peers).items():
            if times > 1:
                yield f"peers = {address}: must be named once"
        try:
            _ = self.tcp, self.metrics_address, self.peer_tls
        except ValueError as error:
            yield str(error)

    @property
    def disk_path(self) -> Path:
        return self.disk_dir if self.disk_dir is not None else self.state_dir / "disk"

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """The tiers that exist, the highest first."""
        sizes = {Tier.DEVICE: self.device, Tier.HOST: self.host_bytes, Tier.DISK: self.disk_bytes}
        return tuple(tier for tier, size in sizes.items() if size)

    @property
    def tcp(self) -> TcpListener | None:
        """The listener for TCP clients. Raises ValueError for an address on which the daemon must not listen."""
        if self.listen_tcp is None:
            return None
        return self._with_tls("listen_tcp", self.listen_tcp)

    @property
    def peer_tls(self) -> ServerTlsFiles | None:
        """The TLS files for connections to peers; None = no TLS, and all peers are on this host. Raises ValueError."""
        found = [self._with_tls("peers", peer.address).tls for peer in self.peers]
        return found[0] if found else None

    def _with_tls(self, name: str, address: str) -> TcpListener:
        files = (self.tls_cert, self.tls_key, self.tls_client_ca)
        return TcpListener.of(address, *files, insecure=self.tcp_insecure, name=name)

    @property
    def metrics_address(self) -> tuple[str, int] | None:
        """Host and port. Raises ValueError for a malformed address."""
        return None if self.metrics_listen is None else host_and_port("metrics_listen", self.metrics_listen)

    @property
    def policy(self) -> Policy:
        """The policy of caches that do not choose their own."""
        edges = ((Tier.DEVICE, Tier.HOST), (Tier.DEVICE, Tier.DISK), (Tier.HOST, Tier.DISK))
        return Policy(
            thresholds=dict.fromkeys(edges, self.demotion_threshold),
            write_policy=self.write_policy,
            eviction=self.eviction,
            clean_most=1 / 8,
            remote=None if self.remote is None else self.remote.writes,
        )
