"""Daemons whose device tier is on a GPU, as far as they can tell: the fake of NVIDIA's bindings in ``tests/fakes``.

:func:`fake_gpu` are the variables of a process that finds the fake; what a daemon did with it stands in its record.
"""

import json
import mmap
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvtier import Tier
from kvtier.abi.layout import ArenaLayout
from tests.fake_cuda import VARIABLE, fake_environment
from tests.integration.blocks import SPEC, sizes
from tests.integration.daemon import DaemonProcess
from tests.integration.supervised import SupervisedDaemon

RECORD: Final = "cuda.jsonl"
PAIRS: Final = {
    "cuMemCreate": "cuMemRelease",
    "cuMemImportFromShareableHandle": "cuMemRelease",
    "cuMemAddressReserve": "cuMemAddressFree",
    "cuMemMap": "cuMemUnmap",
    "cuMemAlloc": "cuMemFree",
    "cuMemHostRegister": "cuMemHostUnregister",
    "cuMemHostAlloc": "cuMemFreeHost",
    "cuStreamCreate": "cuStreamDestroy",
    "cuEventCreate": "cuEventDestroy",
    "cuDevicePrimaryCtxRetain": "cuDevicePrimaryCtxRelease",
}
"""What is begun by a call, and the call that gives it back."""


def fake_gpu(**settings: Any) -> dict[str, str]:
    """Variables to add to a process's. ``settings``: of ``tests/fakes/cuda/bindings/_settings.py``."""
    environment = fake_environment(os.environ, **settings)
    return {name: environment[name] for name in ("PYTHONPATH", VARIABLE)}


def gpu_daemon(
    home: Path,
    tiers: Mapping[Tier, int],
    flags: Sequence[str] = (),
    *,
    device: str = "cuda",
    gpu: Mapping[str, Any] | None = None,
) -> DaemonProcess:
    """Not started yet. ``gpu``: settings of the fake."""
    daemon = DaemonProcess(home, tiers, flags)
    daemon.device = device
    daemon.variables = fake_gpu(record=home / RECORD, **(gpu or {}))
    return daemon


def supervised_gpu_daemon(
    home: Path, tiers: Mapping[Tier, int], flags: Sequence[str] = (), *, gpu: Mapping[str, Any] | None = None
) -> SupervisedDaemon:
    """The same, under a supervisor."""
    daemon = SupervisedDaemon(home, tiers, flags)
    daemon.plain.device = "cuda"
    daemon.plain.variables = fake_gpu(record=home / RECORD, **(gpu or {}))
    return daemon


@contextmanager
def serving(home: Path, *flags: str, gpu: Mapping[str, Any] | None = None, **slots: int) -> Iterator[DaemonProcess]:
    """Stopped at the end, after which nothing of the GPU's may be left."""
    daemon = gpu_daemon(home, sizes(**slots), flags, gpu=gpu)
    with daemon:
        pid = daemon.pid
        yield daemon
    assert not_given_back(home, pid) == {}


def calls(home: Path, pid: int) -> list[dict[str, Any]]:
    """What a process asked of the fake, in order."""
    lines = [json.loads(line) for line in (home / RECORD).read_text().splitlines()]
    return [line for line in lines if line["pid"] == pid and "call" in line]


def not_given_back(home: Path, pid: int) -> dict[str, int]:
    """By the call that would have: how often a process that has ended did not."""
    made = Counter(line["call"] for line in calls(home, pid) if line["code"] == "CUDA_SUCCESS")
    owed: Counter[str] = Counter()
    for begin, end in PAIRS.items():
        owed[end] += made[begin]
    return {end: count - made[end] for end, count in owed.items() if count != made[end]}


def device_generations(control: int) -> NDArray[np.uint64]:
    """Of all slots of the first group on the device, as they change. ``control``: its descriptor."""
    segment = np.frombuffer(mmap.mmap(control, 0, prot=mmap.PROT_READ), dtype=np.uint8)
    return ArenaLayout.read(segment, SPEC).generations(segment, Tier.DEVICE, 0)
