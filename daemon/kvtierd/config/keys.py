"""Every key of the configuration, by section.

A key has a type, a default, a range and one sentence that says what it does; unit, default and range are not repeated
in the sentence, they are told from the field. ``LIVE`` marks what a reload can change.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Final, Literal, Self, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    ByteSize,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import PydanticKnownError
from pydantic_settings import BaseSettings, SettingsConfigDict

from kvtier.abi.attach import ATTACH_SOCKET, DEFAULT_ADDRESS, socket_path
from kvtier.abi.cuda.opening import is_device_name
from kvtierd.config.kinds import (
    LIVE,
    MOST_BYTES,
    Duration,
    FilePath,
    FreeShare,
    Kind,
    OptionalPath,
    Size,
    SizeOrShare,
    show_size,
)
from kvtierd.core.evict import EVICTORS
from kvtierd.core.ids import Tier
from kvtierd.core.policy import DEFAULT_THRESHOLD, NEVER, Policy, WritePolicy
from kvtierd.rights import EVERY_CACHE, SHORTHAND_RIGHTS, AllowRule, UserId
from kvtierd.tcp import TcpListener, host_and_port, is_loopback

ENV_PREFIX: Final = "KVTIERD_"

TierBytes = Annotated[Size, Field(ge=0, le=MOST_BYTES)]
RingBytes = Annotated[Size | None, Field(ge=1 << 16, le=1 << 36), Kind("size", show_size)]
LogBytes = Annotated[Size, Field(ge=0, le=1 << 40)]
LEAST_LOG_BYTES: Final = 1 << 20
PAST_BYTES: Final = 64 << 20
"""Of events that nothing but memory has, where nothing is set: a million changes."""
LOGGED_BYTES: Final = 4 << 20
"""Of those that the log has, too: some 75,000 changes. Who is further behind reads them there, at 0.8 of the speed."""


STAND_IN: Final = "stand-in"


def _device(name: str) -> str:
    if name != STAND_IN and not is_device_name(name):
        raise ValueError("must be stand-in, cuda, cuda:<number> or GPU-<uuid> as nvidia-smi -L shows it")
    return name


class _Section(BaseModel):
    """Keys that belong together. The first line of a section's docstring is its title in the reference."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)  # all are built as one, :class:`Config`

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_for_a_number(cls, value: object, info: ValidationInfo) -> object:
        """Pydantic takes ``true`` for 1."""
        kinds = get_args(annotation := cls.model_fields[str(info.field_name)].annotation) or (annotation,)
        if isinstance(value, bool) and bool not in kinds and not {int, float}.isdisjoint(kinds):
            raise PydanticKnownError("int_type") if int in kinds else PydanticKnownError("float_type")
        return value

    def conflicts(self) -> Iterator[str]:
        """What keys that are right each by itself must not say together. A fault begins with the key to look at."""
        yield from ()


class DirectoryKeys(_Section):
    """Directories"""

    runtime_dir: FilePath = Field(
        Path(DEFAULT_ADDRESS), description="Directory of the sockets. Its path is the daemon's address."
    )
    state_dir: FilePath = Field(
        Path("/var/lib/kvtier"), description="Directory of the daemon's epoch, its event log and its caches' budgets."
    )
    disk_dir: OptionalPath = Field(
        None, description="Directory of the disk tier. Where none is set it is `disk` in the state directory."
    )

    @field_validator("runtime_dir")
    @classmethod
    def _short_enough(cls, runtime_dir: Path) -> Path:
        socket_path(runtime_dir, ATTACH_SOCKET)  # no shorter than the other socket's
        return runtime_dir

    def conflicts(self) -> Iterator[str]:
        # Each is refused at a start where it holds what it did not make: one directory for two would work just once.
        named = {
            "runtime_dir": self.runtime_dir,
            "state_dir": self.state_dir,
            "the event log's": self.state_dir / "events",
            "disk_dir": self.disk_path,
        }
        seen: dict[Path, str] = {}
        for name, path in named.items():
            absolute = path.absolute()
            if absolute in seen:
                yield f"{name} = {str(path)!r}: must not be {seen[absolute]}, which is the same directory"
            seen[absolute] = name

    @property
    def disk_path(self) -> Path:
        return self.disk_dir if self.disk_dir is not None else self.state_dir / "disk"


class TierKeys(_Section):
    """Tiers

    A tier exists if its size is above 0. Any non-empty subset will do.
    """

    device: Annotated[str, AfterValidator(_device)] = Field(
        STAND_IN,
        description="Where the device tier is: `cuda`, `cuda:1` or `GPU-<uuid>` for memory of that GPU, `stand-in` for "
        "shared memory in its place.",
    )
    device_bytes: SizeOrShare = Field(
        ByteSize(0),
        description="Size of the device tier. On a GPU it can be a share of the memory that is free at the start, such "
        "as `80%`.",
    )
    host_bytes: TierBytes = Field(ByteSize(0), description="Size of the host tier.")
    disk_bytes: TierBytes = Field(ByteSize(0), description="Size of the disk tier.")

    def conflicts(self) -> Iterator[str]:
        if not self.tiers:
            yield "no tier is configured: set device_bytes, host_bytes or disk_bytes above 0"
        if isinstance(self.device_bytes, FreeShare) and self.device == STAND_IN:
            yield f"device_bytes = {self.device_bytes}: must be bytes, unless device is a GPU such as cuda"

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """Those that exist, the highest first."""
        return tuple(tier for tier, size in self._sizes().items() if size != 0)

    def tier_bytes(self, device_free: int = 0) -> dict[Tier, int]:
        """Sizes of the tiers that exist, the highest first. ``device_free``: bytes that the GPU has free, of which the
        device tier can be a share."""
        sizes = {tier: size for tier, size in self._sizes().items() if size != 0}
        return {
            tier: size.of(device_free) if isinstance(size, FreeShare) else int(size) for tier, size in sizes.items()
        }

    def _sizes(self) -> dict[Tier, ByteSize | FreeShare]:
        return {Tier.DEVICE: self.device_bytes, Tier.HOST: self.host_bytes, Tier.DISK: self.disk_bytes}

    @property
    def cuda_device(self) -> str | None:
        """The GPU that the device tier is on; None where there is no such tier, or a stand-in for it."""
        return self.device if self.device != STAND_IN and Tier.DEVICE in self.tiers else None


class AccessKeys(_Section):
    """Access"""

    allow_uids: Annotated[tuple[UserId, ...], LIVE] = Field(
        (), description="User ids that may read, write and watch every cache: a short `[[allow]]` rule."
    )
    allow: Annotated[tuple[AllowRule, ...], LIVE] = Field(
        (), description="Who may do what with which caches, besides root and the daemon's own user."
    )
    max_sessions: Annotated[int, LIVE] = Field(1024, ge=1, le=65536, description="Sessions at a time.")
    max_identity_sessions: Annotated[int, LIVE] = Field(
        512,
        ge=1,
        le=65536,
        description="Sessions at a time of one uid, of one certificate's names, or of all `anonymous` clients.",
    )

    @property
    def rules(self) -> tuple[AllowRule, ...]:
        """All rules, the shorthand's included."""
        if not self.allow_uids:
            return self.allow
        everybody = AllowRule(uids=self.allow_uids, caches=(EVERY_CACHE,), verbs=tuple(SHORTHAND_RIGHTS))
        return (everybody, *self.allow)


class TcpKeys(_Section):
    """TCP

    For clients on other hosts and in containers. Without TLS only a loopback address may listen, and only if
    `tcp_insecure` says so.
    """

    listen_tcp: str | None = Field(None, description="host:port to listen on, port 0 = any that is free.")
    tls_cert: OptionalPath = Field(None, description="Certificate chain that clients are shown, PEM.")
    tls_key: OptionalPath = Field(None, description="Its private key, PEM.")
    tls_client_ca: OptionalPath = Field(
        None, description="Authorities that must vouch for a client's certificate, PEM."
    )
    tcp_insecure: bool = Field(False, description="No TLS: nobody knows who calls, and rules call them `anonymous`.")
    tcp_grace_seconds: Duration = Field(
        30.0, ge=0, le=3600, description="A session whose connection broke can be resumed for so long, then it ends."
    )
    tcp_heartbeat_seconds: Duration = Field(
        5.0, ge=0.01, le=3600, description="Time between heartbeats on a session's connection; three missed break it."
    )

    def conflicts(self) -> Iterator[str]:
        if self.listen_tcp is None:
            for name in ("tls_cert", "tls_key", "tls_client_ca", "tcp_insecure"):
                if getattr(self, name):
                    yield f"{name} = {getattr(self, name)}: is of no use, since listen_tcp is not set"
            return
        try:
            _ = self.tcp
        except ValueError as error:
            yield str(error)

    @property
    def tcp(self) -> TcpListener | None:
        """Where to listen for TCP clients. Raises ValueError for what must not be."""
        if self.listen_tcp is None:
            return None
        return TcpListener.of(
            self.listen_tcp, self.tls_cert, self.tls_key, self.tls_client_ca, insecure=self.tcp_insecure
        )


class CacheKeys(_Section):
    """Caches"""

    max_reserved_fraction: Annotated[float, LIVE] = Field(
        1.0, gt=0, le=1, description="Of a tier's slots of a window group, how many one session may hold reserved."
    )
    max_session_leases: Annotated[int, LIVE] = Field(65536, ge=1, le=1 << 24, description="Leases of one session.")
    max_pinned_fraction: float = Field(
        0.5, ge=0, le=1, description="Of a tier's slots of a window group, how many may be pinned."
    )
    tier_grace: Annotated[Duration, LIVE] = Field(
        30.0,
        ge=0.01,
        le=86400,
        description="Where nothing has worked on a cache's disk for so long, what it holds is declared lost; it is "
        "taken back, empty, when it works again.",
    )
    idle_ttl: Annotated[Duration, LIVE] = Field(
        0.0,
        ge=0,
        le=366 * 86400,
        description="A cache that no session has open for so long gives its device and host memory back, after what is "
        "worth it was copied to disk. The next open brings it back. 0 = never.",
    )


Share = Annotated[float, Field(ge=0, le=1)]
Threshold = Annotated[int, Field(ge=0, le=NEVER)]


def _eviction(name: str) -> str:
    if name not in EVICTORS:
        raise ValueError(f"must be one of {', '.join(EVICTORS)}")
    return name


class PolicyKeys(_Section):
    """Policy

    Of caches that do not choose themselves when they are opened. A threshold is the least effective priority with which
    a block goes down from one tier to another: 0 = always, 101 = never. A cache keeps the write policy and the eviction
    that it was made with.
    """

    write_policy: WritePolicy = Field(
        WritePolicy.BACK,
        description="When blocks are copied down: when their slot is wanted, at once, or at their second use.",
    )
    eviction: Annotated[str, AfterValidator(_eviction)] = Field(
        "lru", description=f"Who goes first inside a priority: {', '.join(EVICTORS)}."
    )
    threshold_device_to_host: Threshold = Field(DEFAULT_THRESHOLD, description="Priority to go from device to host.")
    threshold_device_to_disk: Threshold = Field(DEFAULT_THRESHOLD, description="Priority to go from device to disk.")
    threshold_host_to_disk: Threshold = Field(DEFAULT_THRESHOLD, description="Priority to go from host to disk.")
    clean_low_fraction: Share = Field(
        0.0,
        description="Where fewer of a tier's slots are free or READY below as well, copies are made ahead of need; 0 = "
        "never.",
    )
    clean_high_fraction: Share = Field(
        0.0, description="So many of a tier's slots it then makes clean; 0.1 and 0.2 halve the calls that wait."
    )

    def conflicts(self) -> Iterator[str]:
        low, high = self.clean_low_fraction, self.clean_high_fraction
        if low > high:
            yield f"clean_low_fraction = {low:g}: must be at most clean_high_fraction = {high:g}"


class CallKeys(_Section):
    """Calls"""

    wait_seconds: Annotated[Duration, LIVE] = Field(
        30.0, gt=0, le=3600, description="How long a call waits for room if it does not say."
    )
    transfer_idle_seconds: Annotated[Duration, LIVE] = Field(
        30.0,
        ge=0.01,
        le=3600,
        description="A put or get stream without progress for so long is ended: a put that brings too few bytes, a get "
        "of which no message (at most 1 MiB) is taken.",
    )
    transfer_idle_bytes: Annotated[Size, LIVE, Field(ge=1, le=1 << 30)] = Field(
        ByteSize(64 << 10), description="So many bytes a put must bring in every `transfer_idle_seconds`, or end."
    )
    shutdown_seconds: Annotated[Duration, LIVE] = Field(
        30.0, gt=0, le=3600, description="A clean stop lets moves end for so long at most."
    )


class EventKeys(_Section):
    """Events"""

    heartbeat_seconds: Annotated[Duration, LIVE] = Field(
        10.0, ge=0.01, le=3600, description="Quiet after which a watcher that does not say is sent an empty batch."
    )
    event_ring_bytes: RingBytes = Field(
        None,
        description="Memory for past events, and so much, but at least 4MiB, for those that wait for the log's disk. "
        "Where none is set: 4MiB, and 64MiB for what waits; 64MiB where there is no log.",
    )
    event_ring_events: int = Field(1 << 18, ge=1, le=1 << 28, description="Past events kept in memory at most.")
    event_log_bytes: LogBytes = Field(
        ByteSize(256 << 20),
        description="Size of the file in the state directory that keeps past events over restarts, 1MiB or more; "
        "0 = there is none.",
    )
    event_log_age: Duration = Field(
        7 * 86400.0, ge=1, le=10 * 366 * 86400, description="Events in it that are older are deleted."
    )

    @property
    def past_bytes(self) -> int:
        """For past events in memory."""
        return self.event_ring_bytes or (LOGGED_BYTES if self.event_log_bytes else PAST_BYTES)

    @property
    def unlogged_bytes(self) -> int:
        """For events that wait for the log's disk, unless that is too little for it."""
        return self.event_ring_bytes or PAST_BYTES

    @field_validator("event_log_bytes")
    @classmethod
    def _large_enough(cls, event_log_bytes: ByteSize) -> ByteSize:
        if 0 < event_log_bytes < LEAST_LOG_BYTES:
            raise ValueError(f"must be 0 or at least {show_size(LEAST_LOG_BYTES)}")
        return event_log_bytes


class MetricsKeys(_Section):
    """Metrics

    For Prometheus, over HTTP; see docs/observability.md. Whoever can connect can read them.
    """

    metrics_listen: str | None = Field(
        None, description="host:port to serve metrics on, such as 127.0.0.1:9464; port 0 = any that is free."
    )
    metrics_public: bool = Field(False, description="The address of the metrics need not be a loopback one.")

    def conflicts(self) -> Iterator[str]:
        if self.metrics_listen is None and self.metrics_public:
            yield "metrics_public = true: metrics_listen is not set"
        try:
            address = self.metrics_address
        except ValueError as error:
            yield str(error)
            return
        if address is not None and not (self.metrics_public or is_loopback(address[0])):
            yield f"metrics_listen = {self.metrics_listen}: must be a loopback address, unless metrics_public = true"

    @property
    def metrics_address(self) -> tuple[str, int] | None:
        """Host and port. Raises ValueError for what is no address."""
        return None if self.metrics_listen is None else host_and_port("metrics_listen", self.metrics_listen)


class DiagnosisKeys(_Section):
    """Diagnosis"""

    log_level: Annotated[Literal["debug", "info", "warning", "error"], LIVE] = Field(
        "info", description="Least level that is logged."
    )
    log_format: Annotated[Literal["logfmt", "json"], LIVE] = Field(
        "logfmt", description="Form of log lines: key=value pairs, or one JSON object a line."
    )
    debug_checks: bool = Field(False, description="Check all invariants of the core after every step. Slow.")
    chaos_seed: int | None = Field(
        None, ge=0, description="For tests: the device stand-in completes its copies late and out of order."
    )


class Config(
    DirectoryKeys,
    TierKeys,
    AccessKeys,
    TcpKeys,
    CacheKeys,
    PolicyKeys,
    CallKeys,
    EventKeys,
    MetricsKeys,
    DiagnosisKeys,
    BaseSettings,
):
    """All keys. Made by :func:`kvtierd.config.load.read`, which names the source of every fault."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, extra="forbid", frozen=True, defer_build=False)

    @model_validator(mode="after")
    def _without_conflicts(self) -> Self:
        faults = [fault for section in SECTIONS for fault in section.conflicts(self)]
        if faults:
            raise ValueError("\n".join(faults))
        return self

    @property
    def policy(self) -> Policy:
        """What caches have that do not choose themselves."""
        return Policy(
            thresholds={
                (Tier.DEVICE, Tier.HOST): self.threshold_device_to_host,
                (Tier.DEVICE, Tier.DISK): self.threshold_device_to_disk,
                (Tier.HOST, Tier.DISK): self.threshold_host_to_disk,
            },
            write_policy=self.write_policy,
            eviction=self.eviction,
            clean_low=self.clean_low_fraction,
            clean_high=self.clean_high_fraction,
            max_pinned=self.max_pinned_fraction,
        )


SECTIONS: Final = tuple(base for base in Config.__bases__ if issubclass(base, _Section))
"""In the order in which they are told."""

KEYS: Final[dict[str, FieldInfo]] = {
    name: field for section in SECTIONS for name, field in section.model_fields.items()
}
"""Every key, in that order."""
