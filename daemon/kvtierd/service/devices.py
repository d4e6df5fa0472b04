"""The devices of the caches' device tiers, a device per ``[[device]]`` table.

A device has its own bytes for the device tier; all devices share the bytes of host and disk. A cache lives on a single
device.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import grpc

from kvtierd.core.ids import Tier
from kvtierd.service.budgets import Account, Budgets, TierBudget
from kvtierd.service.errors import bad_argument, refused
from kvtierd.tiers.cuda.pool import SILENT_S, DaemonGpu


@dataclass(slots=True, frozen=True)
class Device:
    """``name``: as configured. ``id``: the GPU's uuid, else the name; a restart finds the device by its id. ``gpu``:
    None = a stand-in, or a GPU that cannot be opened. ``budgets``: of the device's caches. ``absent``: why the GPU
    cannot be opened."""

    name: str
    id: str
    gpu: DaemonGpu | None
    budgets: Budgets
    absent: str | None = None

    @property
    def lost(self) -> str | None:
        """Why the device is out of service until a restart; None = it is in service."""
        return self.absent if self.gpu is None else self.gpu.lost

    @property
    def problem(self) -> str | None:
        if self.lost is not None:
            says = "is lost, and its device tiers are out of service until a restart that finds it"
            return f"GPU {self.id} ({self.name}) {says}: {self.lost}"
        silent_s = 0.0 if self.gpu is None else self.gpu.silent_s
        return None if silent_s < SILENT_S else f"GPU {self.id} ({self.name}) has not answered for {silent_s:.0f} s"


class Devices:
    """All devices, in the order of the configuration. ``shared``: budgets of host and disk."""

    def __init__(self, devices: Iterable[Device], shared: Budgets) -> None:
        self._devices: Final = tuple(devices)
        self._none: Final = Device("", "", None, shared)

    def __iter__(self) -> Iterator[Device]:
        return iter(self._devices)

    @property
    def accounts(self) -> list[Account]:
        """The accounts of every tier: of each device, of host and disk."""
        own = [each for device in self for each in device.budgets.accounts if each.tier is Tier.DEVICE]
        return own + self._none.budgets.accounts

    @property
    def gpus(self) -> list[DaemonGpu]:
        return [device.gpu for device in self if device.gpu is not None]

    def problems(self) -> list[str]:
        return [problem for device in self if (problem := device.problem) is not None]

    def for_new(self, named: str, asked: Mapping[Tier, TierBudget]) -> Device:
        """The device of a new cache.

        Args:
            named: Its name or id; "" = the device with the most bytes left, or none if ``asked`` has no device tier.

        Raises:
            CallRefused: INVALID_ARGUMENT for an unknown device, UNAVAILABLE for a lost device.
        """
        if not named:
            return self._none if asked and Tier.DEVICE not in asked else self._roomiest()
        found = next((device for device in self if named in (device.name, device.id)), None)
        if found is None:
            known = " or ".join(dict.fromkeys(name for device in self for name in (device.name, device.id)))
            raise bad_argument("device", named, known or "absent: this daemon has no device")
        if found.lost is not None:
            raise refused(grpc.StatusCode.UNAVAILABLE, "TIER_OFFLINE", str(found.problem))
        return found

    def for_known(self, device: str | None) -> Device:
        """The device of a cache of an earlier life, or another if it is gone. ``device``: its id; None = unknown."""
        return self._none if device == "" else next((one for one in self if one.id == device), self._roomiest())

    def lacks(self, device: str | None) -> bool:
        """Whether the device of a cache of an earlier life is gone."""
        return bool(device) and all(one.id != device for one in self)

    def _roomiest(self) -> Device:
        in_service = [device for device in self if device.lost is None]
        return max(in_service, key=lambda device: device.budgets.left(Tier.DEVICE), default=self._none)
