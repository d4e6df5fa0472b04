"""One figure, and how a list of them is written down."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

MIB = 1 << 20


@dataclass(slots=True, frozen=True)
class Result:
    """``ratio`` is ``value / floor``: of a rate the more the better, of a time or a size the less.

    ``floor``: what was measured without kvtier, or at the smallest size; None = there is no such thing. ``params``:
    what was measured, and with how many rounds. ``spread`` in it: the middle 80 % of the rounds, as a part of their
    median.
    """

    name: str
    params: Mapping[str, Any]
    value: float
    unit: str
    floor: float | None = None

    @property
    def ratio(self) -> float | None:
        return self.value / self.floor if self.floor else None

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "params": dict(self.params),
            "value": _rounded(self.value),
            "unit": self.unit,
            "floor": None if self.floor is None else _rounded(self.floor),
            "ratio": None if self.ratio is None else _rounded(self.ratio),
        }


@dataclass(slots=True)
class Paired:
    """Seconds of rounds, ours and the floor's, measured in turn."""

    ours: list[float] = field(default_factory=list)
    floor: list[float] = field(default_factory=list)

    def params(self) -> dict[str, Any]:
        """For :attr:`Result.params`."""
        return {"rounds": len(self.ours), "spread": spread(self.ours), "floor_spread": spread(self.floor)}

    def rate(self, name: str, params: Mapping[str, Any], nbytes: int) -> Result:
        """MiB/s of rounds that move ``nbytes`` each."""
        mib = nbytes / MIB
        return Result(
            name,
            {**params, **self.params()},
            mib / statistics.median(self.ours),
            "MiB/s",
            mib / statistics.median(self.floor),
        )

    def time(self, name: str, params: Mapping[str, Any]) -> Result:
        """Microseconds a round."""
        ours, floor = (1e6 * statistics.median(times) for times in (self.ours, self.floor))
        return Result(name, {**params, **self.params()}, ours, "us", floor)


def spread(times: Sequence[float]) -> float:
    """The range of the middle 80 %, as a part of the median."""
    if len(times) < 2:
        return 0.0
    deciles = statistics.quantiles(times, n=10)
    return round((deciles[-1] - deciles[0]) / statistics.median(times), 3)


def quantile(times: Sequence[float], q: float) -> float:
    """By the nearest rank."""
    ranked = sorted(times)
    return ranked[min(len(ranked) - 1, int(q * len(ranked)))]


def _rounded(value: float) -> float:
    return float(f"{value:.5g}")
