"""Whose memory the device tier of the tests' daemons is: a property of the whole test session, told by the environment.

``KVTIER_TEST_DEVICE`` unset, or "stand-in": shared memory. "fake": CUDA, with NVIDIA's bindings played by
``tests/fakes``, which go before the real ones wherever Python looks, in every process of the session: pytest's own is a
client, too. Anything else: a GPU, named as the daemon's configuration names it.
"""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

VARIABLE: Final = "KVTIER_TEST_DEVICE"
STAND_IN: Final = "stand-in"
FAKE: Final = "fake"
FAKES: Final = Path(__file__).parent / "fakes"

DEVICE: Final = os.environ.get(VARIABLE) or STAND_IN
ON_CUDA: Final = DEVICE != STAND_IN
"""Slots of the device are reached through CUDA's driver, be it NVIDIA's or the fake."""
ON_FAKE: Final = DEVICE == FAKE
NAME: Final = "cuda" if ON_FAKE else DEVICE
"""As a daemon's configuration has it."""


CLIENT: Final = "KVTIER_FAKE_CUDA_CLIENT"
"""Told to the fake in the clients of the session, pytest's process among them: what they read without a lease may be
overtaken by what others write, which generations tell. A daemon's copies are judged in full."""


def of_daemon(environment: Mapping[str, str]) -> dict[str, str]:
    """What of an environment is for a daemon: nothing that configures one, nor what clients are told."""
    return {
        name: value for name, value in environment.items() if not name.upper().startswith("KVTIERD_") and name != CLIENT
    }


def with_fakes(environment: dict[str, str]) -> dict[str, str]:
    """An environment whose Python finds the fakes first."""
    rest = environment.get("PYTHONPATH")
    return environment | {"PYTHONPATH": os.pathsep.join([str(FAKES), *([rest] if rest else [])])}


def prepare() -> None:
    """To be called before anything imports ``cuda``: this process, and all that it starts, find what the session is to
    run on."""
    if ON_FAKE:
        sys.path.insert(0, str(FAKES))
        os.environ |= with_fakes(dict(os.environ)) | {CLIENT: "1"}
