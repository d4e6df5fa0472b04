"""Configuration: a TOML file, ``KVTIERD_*`` in the environment, command-line flags; the later wins.

Every key is a field of :class:`Config`, in all three. Unknown keys and bad values are refused with their source and the
reason.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self, cast

from pydantic import ByteSize, Field, ValidationError, ValidatorFunctionWrapHandler, WrapValidator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict, SettingsError

from kvtier.abi.attach import DEFAULT_ADDRESS
from kvtierd.core.ids import Tier
from kvtierd.rights import EVERY_CACHE, SHORTHAND_RIGHTS, AllowRule

ENV_PREFIX: Final = "KVTIERD_"
_MAX_BYTES: Final = 1 << 50


def _size(value: object, parse: ValidatorFunctionWrapHandler) -> ByteSize:
    """Pydantic's own takes ``true`` for a byte, and its messages leave open what would be right."""
    says = "must be bytes, 0 or more, or text such as 8GiB"
    if isinstance(value, bool):
        raise ValueError(says)
    try:
        return cast(ByteSize, parse(value))
    except ValidationError as error:
        raise ValueError(says) from error


Size = Annotated[ByteSize, WrapValidator(_size)]
TierBytes = Annotated[Size, Field(ge=0, le=_MAX_BYTES)]
RingBytes = Annotated[Size, Field(ge=1 << 16, le=1 << 36)]


class ConfigError(Exception):
    """The configuration is refused: one line a fault, each with its source, key and reason."""


class Config(BaseSettings):
    """Sizes are bytes, or text such as ``8GiB``. A tier exists if its size is above 0; any non-empty subset will do."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, extra="forbid", frozen=True)

    runtime_dir: Path = Field(
        Path(DEFAULT_ADDRESS), description="Directory of the sockets; its path is the daemon's address."
    )
    state_dir: Path = Field(Path("/var/lib/kvtier"), description="Directory of the daemon's epoch and event ids.")
    disk_dir: Path | None = Field(None, description="Directory of the disk tier. Default: disk in the state directory.")
    device_bytes: TierBytes = Field(ByteSize(0), description="Size of the device tier. 0 = none, at most 1 PiB.")
    host_bytes: TierBytes = Field(ByteSize(0), description="Size of the host tier. 0 = none, at most 1 PiB.")
    disk_bytes: TierBytes = Field(ByteSize(0), description="Size of the disk tier. 0 = none, at most 1 PiB.")
    allow_uids: tuple[Annotated[int, Field(ge=0, lt=2**32)], ...] = Field(
        (), description="User ids that may read, write and watch every cache: a short [[allow]] rule. Default: none."
    )
    allow: tuple[AllowRule, ...] = Field(
        (), description="Who may do what with which caches, besides root and the daemon's own user. Default: nobody."
    )
    max_sessions: int = Field(1024, ge=1, le=65536, description="Sessions at a time, 1 to 65536.")
    wait_seconds: float = Field(
        30.0, gt=0, le=3600, description="How long a call waits for room if it does not say, above 0 to 3600 s."
    )
    heartbeat_seconds: float = Field(
        10.0, ge=0.01, le=3600, description="Quiet after which a watcher is sent an empty batch, 0.01 to 3600 s."
    )
    event_ring_bytes: RingBytes = Field(ByteSize(64 << 20), description="Memory for past events, 64 KiB to 64 GiB.")
    event_ring_events: int = Field(1 << 18, ge=1, le=1 << 28, description="Past events kept at most, 1 to 2^28.")
    shutdown_seconds: float = Field(
        30.0, gt=0, le=3600, description="A clean stop takes at most so long, above 0 to 3600 s."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least level that is logged.")
    debug_checks: bool = Field(False, description="Check all invariants of the core after every step. Slow.")
    chaos_seed: int | None = Field(
        None, ge=0, description="For tests: the device stand-in completes its copies late and out of order."
    )

    @model_validator(mode="after")
    def _some_tier(self) -> Self:
        if not self.tier_bytes:
            raise ValueError("no tier is configured: set device_bytes, host_bytes or disk_bytes above 0")
        return self

    @property
    def tier_bytes(self) -> dict[Tier, int]:
        """Sizes of the tiers that exist, the highest first."""
        sizes = {Tier.DEVICE: self.device_bytes, Tier.HOST: self.host_bytes, Tier.DISK: self.disk_bytes}
        return {tier: int(size) for tier, size in sizes.items() if size > 0}

    @property
    def rules(self) -> tuple[AllowRule, ...]:
        """All rules, the shorthand's included."""
        if not self.allow_uids:
            return self.allow
        everybody = AllowRule(uids=self.allow_uids, caches=(EVERY_CACHE,), verbs=tuple(SHORTHAND_RIGHTS))
        return (everybody, *self.allow)

    @property
    def disk_path(self) -> Path:
        return self.disk_dir if self.disk_dir is not None else self.state_dir / "disk"


def load(file: Path | None, flags: Mapping[str, object]) -> Config:
    """The configuration of all sources. ``flags``: those given, by field name. Raises :class:`ConfigError`."""
    in_file = _read_toml(file) if file is not None else {}
    in_env = {key[len(ENV_PREFIX) :].lower(): key for key in os.environ if key.upper().startswith(ENV_PREFIX)}
    in_env.pop("config", None)  # names the file
    sources = (
        {name: f"{file}: {name}" for name in in_file}
        | {name: f"environment: {key}" for name, key in in_env.items()}
        | {name: f"flag --{name.replace('_', '-')}" for name in flags}
    )
    unknown = [source for name, source in sources.items() if name not in Config.model_fields]
    if unknown:
        raise ConfigError("\n".join(f"{source}: there is no such key" for source in unknown))
    below_env = {name: value for name, value in in_file.items() if name not in in_env}
    try:
        return Config(**{**below_env, **flags})
    except ValidationError as error:
        raise ConfigError("\n".join(_faults(error, sources))) from error
    except SettingsError as error:
        raise ConfigError(f"environment: {error}") from error


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from error


def _faults(error: ValidationError, sources: Mapping[str, str]) -> Iterator[str]:
    for fault in error.errors():
        reason = fault["msg"].removeprefix("Value error, ")
        if not fault["loc"]:
            yield reason
            continue
        name, *inside = fault["loc"]
        where = "".join(f"[{step}]" for step in inside)
        yield f"{sources.get(str(name), name)}{where} = {fault['input']!r}: {reason}"
