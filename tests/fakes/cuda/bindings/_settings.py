"""How the fake behaves, from the JSON object in ``KVTIER_FAKE_CUDA``. Each field has a default."""

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

VARIABLE: Final = "KVTIER_FAKE_CUDA"
CLIENT: Final = "KVTIER_FAKE_CUDA_CLIENT"
FEATURES: Final = ("vmm", "posix_fd", "batch_copy", "registered_address")


@dataclass(slots=True)
class Failure:
    """``call`` answers ``code`` from its call number ``after`` on (0: the first), ``times`` times (0: for ever)."""

    call: str
    code: str
    after: int = 0
    times: int = 1


@dataclass(slots=True)
class Settings:
    """``max_delay_ms``: how late a stream may do what it was given, chosen anew for every piece from ``seed``.

    ``memory``: bytes of each of ``devices`` devices, counted in each process by itself, or over all processes with the
    same ``shared``, a name. ``bindings``: 12 or 13, where
    their forms differ. ``features_off``: of FEATURES. ``lost``: a path; while a file is there every call answers the
    code that is its text, LAUNCH_FAILED where it has none, and for ever after in a process that has seen it; with
    ``lost_device``, a number, only where a context of that device is current.
    ``hold``: a path; while a file is there streams begin nothing, as behind a long kernel. ``record``: a path to which
    every call is added as a line of JSON, and what was not given back when the process ended. ``overtaken``: a read may
    meet a write of another stream, as where a client reads without a lease and finds out by generations; by default
    so in processes that have the variable CLIENT.
    """

    seed: int = 0
    max_delay_ms: float = 1.0
    memory: int = 1 << 30
    shared: str = ""
    devices: int = 1
    driver_version: int = 13000
    bindings: int = 13
    features_off: tuple[str, ...] = ()
    fail: list[Failure] = field(default_factory=list)
    lost: Path | None = None
    lost_device: int | None = None
    hold: Path | None = None
    record: Path | None = None
    overtaken: bool = False

    def __post_init__(self) -> None:
        if unknown := set(self.features_off) - set(FEATURES):
            raise ValueError(f"{VARIABLE}: features_off {sorted(unknown)}: must be of {FEATURES}")
        if "batch_copy" in self.features_off:
            self.driver_version = min(self.driver_version, 12080)  # what tells kvtier that there is none


def read_settings() -> Settings:
    fields = json.loads(os.environ.get(VARIABLE) or "{}")
    fields["fail"] = [Failure(**failure) for failure in fields.get("fail", ())]
    for name in ("lost", "hold", "record"):
        if fields.get(name):
            fields[name] = Path(fields[name])
    return Settings(**{"overtaken": CLIENT in os.environ} | fields)
