"""How a call of the driver is made: with the lock, counted, written down, and answering as NVIDIA's do."""

import functools
from collections.abc import Callable
from typing import Any

from ._enums import CUresult
from ._refusal import Refusal, invalid
from ._state import STATE
from ._structs import CUdevice

_Function = Callable[..., Any]


def entry(outputs: int = 0, *, after_loss: bool = False) -> Callable[[_Function], _Function]:
    """A call of the driver. ``outputs``: values it answers beside the code. ``after_loss``: works on a lost device."""

    def wrap(function: _Function) -> _Function:
        @functools.wraps(function)
        def call(*arguments: Any) -> Any:
            return STATE.call(function, arguments, outputs, after_loss)

        call.outputs = outputs  # type: ignore[attr-defined]
        return call

    return wrap


def number_of(dev: CUdevice | int) -> int:
    visible = STATE.visible()
    if not 0 <= int(dev) < len(visible):
        raise Refusal(CUresult.CUDA_ERROR_INVALID_DEVICE, f"no device {int(dev)}")
    return visible[int(dev)]


def must_be_zero(flags: int) -> None:
    if flags:
        raise invalid("flags must be 0")


def must_be_an_int(value: int) -> None:
    if not isinstance(value, int):
        raise TypeError(f"Provided argument is of type {type(value)} but expected int")
