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
from kvtierd.core.policy import DEFAULT_THRESHOLD, MAX_PRIORITY, NEVER, Policy, RemotePolicy, RemoteWrites, WritePolicy
from kvtierd.rights import AllowRule
from kvtierd.tcp import TcpListener, TlsFiles, host_and_port
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
Size = Annotated[ByteSize, BeforeValidator(_size)]
TierShare = Annotated[Share, PlainValidator(_share), PlainSerializer(str)]
TierBytes = Annotated[Size, Field(ge=0, le=_MAX_TIER_BYTES), AfterValidator(_some_pages)]
DeviceBytes = Annotated[
    ByteSize | Share,
    PlainValidator(_size_or_share),
    PlainSerializer(lambda size: str(size) if isinstance(size, Share) else int(size)),
]
_SOME_BYTES: Final[TypeAdapter[ByteSize]] = TypeAdapter(Annotated[Size, Field(gt=0, le=_MAX_TIER_BYTES)])


class Device(BaseModel):
    """A ``[[device]]`` table; ``NAME=BYTES`` as a flag or as an element in the environment."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Annotated[str, AfterValidator(_device)] = Field(
        description="`cuda`, `cuda:1` or `GPU-<uuid>` for the memory of that GPU, which no other table may name; "
        "`stand-in` for shared memory."
    )
    bytes: DeviceBytes = Field(
        description="Bytes of it for device tiers, above 0. On a GPU it can be a share of the memory that is free at "
        "the first start, such as `80%`; later starts take as many bytes."
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


class Remote(BaseModel):
    """The ``[remote]`` table; as a flag its URL alone."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    url: Annotated[str, AfterValidator(urls.check), PlainSerializer(urls.shown)] = Field(
        description="Store for blocks beyond this host: `s3://bucket/prefix`, `gs://…`, `az://…`, `file:///directory` "
        "that hosts share, or `mooncake://…`. Credentials come from the environment."
    )
    write: RemotePolicy = Field(
        RemotePolicy.EVICT,
        description="When a block is written there: shortly before it leaves the lowest tier, at its second use, or at "
        "once.",
    )
    min_priority: int = Field(0, ge=0, le=MAX_PRIORITY, description="Least effective priority of what is written.")
    first_tokens: int = Field(0, ge=0, description="Only blocks of the first so many tokens of a prompt; 0 = all.")
    ahead: float = Field(
        0.05,
        gt=0,
        le=1,
        description="With `evict`, the share of the lowest tier that is written ahead of need.",
    )
    bytes_per_second: Annotated[Size, Field(ge=0)] = Field(
        ByteSize(0), description="Most bytes a second that are written; 0 = no limit."
    )
    timeout_seconds: float = Field(5.0, gt=0, le=600, description="How long one call of the store may take.")
    group_access: bool = Field(
        False, description="Whether the group of a shared directory can read and write the objects, too."
    )

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


class Peer(BaseModel):
    """A ``[[peers]]`` table; ``HOST:PORT`` as a flag or as an element in the environment."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    address: Annotated[str, AfterValidator(_peer_address)] = Field(
        description="host:port of its `listen_tcp`, as its certificate names it."
    )

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        return {"address": value} if isinstance(value, str) else value


class Config(BaseSettings):
    """All keys. :func:`kvtierd.config.load.read` fills them from all sources."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, extra="forbid", frozen=True)

    runtime_dir: Annotated[FilePath, AfterValidator(_runtime_dir)] = Field(
        Path(DEFAULT_ADDRESS), description="Directory of the sockets. Its path is the daemon's address."
    )
    state_dir: FilePath = Field(
        Path("/var/lib/kvtier"), description="Directory of the daemon's epoch, its event log and its caches' budgets."
    )
    disk_dir: Annotated[Path | None, BeforeValidator(_path)] = Field(
        None, description="Directory of the disk tier. By default `disk` in the state directory."
    )

    device: Annotated[tuple[Device, ...], NoDecode, BeforeValidator(_listed)] = Field(
        (), description="What device tiers are on. As a flag `NAME=BYTES`, such as `--device cuda:1=80%`."
    )
    host_bytes: TierBytes = Field(
        ByteSize(0),
        description="Size of the host tier. A tier exists if its size is above 0; at least one tier must exist.",
    )
    disk_bytes: TierBytes = Field(ByteSize(0), description="Size of the disk tier.")
    default_budget: TierShare = Field(
        Share(0.25),
        description="Share of each tier that a cache gets that is opened without budgets, or all that is left of the "
        "tier if that is less.",
    )
    sync: Literal["batch", "commit"] = Field(
        "batch",
        description="What a power cut may undo of the disk tier: the last transaction of each cache, or with `commit` "
        "nothing that was acknowledged, for one more write to the medium a transaction.",
    )
    remote: Annotated[Remote | None, NoDecode, BeforeValidator(_table)] = Field(
        None, description="A store beyond this host, under its tiers. Blocks come from it into the host tier."
    )

    allow: Annotated[tuple[AllowRule, ...], NoDecode, BeforeValidator(_listed)] = Field(
        (), description="Who may do what with which caches, besides root and the daemon's own user."
    )
    max_sessions: int = Field(
        1024, ge=1, le=65536, description="Sessions at a time. One user, or one certificate, may have half of them."
    )

    listen_tcp: str | None = Field(
        None,
        description="host:port to listen on for clients on other hosts, port 0 = any that is free. Needs the three TLS "
        "files, or `tcp_insecure`.",
    )
    tls_cert: Annotated[Path | None, BeforeValidator(_path)] = Field(
        None, description="Certificate chain that clients are shown, PEM."
    )
    tls_key: Annotated[Path | None, BeforeValidator(_path)] = Field(None, description="Its private key, PEM.")
    tls_client_ca: Annotated[Path | None, BeforeValidator(_path)] = Field(
        None, description="Authorities that must vouch for a client's certificate, PEM."
    )
    tcp_insecure: bool = Field(
        False, description="No TLS, on a loopback address only. Every client is `anonymous` to the rules."
    )
    tcp_grace_seconds: float = Field(
        30.0, ge=0, le=3600, description="How long a session whose connection broke can be resumed before it ends."
    )

    peers: Annotated[tuple[Peer, ...], NoDecode, BeforeValidator(_listed), Field(max_length=_MAX_PEERS)] = Field(
        (),
        description="Other daemons to follow, at most 64; if this one is among them, it is passed over. It shows them "
        "`tls_cert`, and `tls_client_ca` must vouch for theirs; or `tcp_insecure`. As a flag `HOST:PORT`.",
    )

    max_reserved_fraction: float = Field(
        0.9,
        gt=0,
        le=1,
        description="Share of a tier's slots of a window group that one session may hold reserved. With 1 it can leave "
        "no slot for reads of blocks on disk.",
    )
    tier_grace_seconds: float = Field(
        30.0,
        ge=0.01,
        le=86400,
        description="If nothing has worked on a cache's disk for so long, what it holds is declared lost. The disk is "
        "taken back, empty, when it works again.",
    )

    write_policy: WritePolicy = Field(
        WritePolicy.BACK,
        description="When blocks are copied down: when their slot is wanted, at once, or at their second use. A cache "
        "can choose its own when it is made; so for the next four keys.",
    )
    eviction: Literal["lru", "lfuda"] = Field(
        "lru", description="How the block of a priority that goes first is chosen."
    )
    event_hash: Literal["", "v1_block_key", "v2_sha256", "v2_sha256_64"] = Field(
        "", description="What events name blocks by besides their keys, for TensorRT-LLM's routers."
    )
    keep_tokens: bool = Field(
        False,
        description="Whether blocks keep the token ids that they are stored with, for events. Routers that place "
        "requests by tokens need it. A cache can only choose more.",
    )
    demotion_threshold: int = Field(
        DEFAULT_THRESHOLD,
        ge=0,
        le=NEVER,
        description="Least effective priority with which a block goes down to a lower tier: 0 = always, 101 = never.",
    )

    wait_seconds: float = Field(
        30.0, gt=0, le=3600, description="How long a call that does not say waits for room in a tier."
    )
    transfer_idle_seconds: float = Field(
        30.0,
        ge=0.01,
        le=3600,
        description="A put stream must bring 64 KiB in this time, and a get stream must have a message taken, or it is "
        "ended.",
    )
    shutdown_seconds: float = Field(30.0, gt=0, le=3600, description="How long a clean stop lets moves end.")

    event_ring_bytes: Annotated[Size, Field(ge=1 << 10, le=1 << 36)] = Field(
        ByteSize(16 << 20), description="Memory for past events."
    )
    event_log_bytes: Annotated[Size, Field(ge=0, le=1 << 40)] = Field(
        ByteSize(256 << 20),
        description="Disk space in the state directory for past events, from which watchers resume over restarts; 0 = "
        "none.",
    )

    metrics_listen: str | None = Field(
        None,
        description="host:port to serve Prometheus metrics on, such as 127.0.0.1:9464; port 0 = any that is free. "
        "Whoever can connect can read them.",
    )
    traces: Annotated[str, AfterValidator(_collector)] | None = Field(
        None,
        description="Where an OpenTelemetry collector takes OTLP over gRPC, such as http://127.0.0.1:4317: spans of "
        "calls and moves go there. Needs the extra `kvtier[otel]`.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least level that is logged.")
    debug_checks: bool = Field(False, description="Check all invariants of the core after every step. Slow.")
    chaos_seed: int | None = Field(
        None, ge=0, description="For tests: the device stand-in completes its copies late and out of order."
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
    def peer_tls(self) -> TlsFiles | None:
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
