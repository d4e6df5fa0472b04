"""A connector's counts in vLLM's log, each ten seconds, and in its metrics, as ``vllm:kvtier_*``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

import prometheus_client
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

_TOTALS: Final[Mapping[str, str]] = {
    "blocks loaded": "loaded_blocks",
    "blocks saved": "saved_blocks",
    "blocks fetched from the store": "fetched_blocks",
    "load bytes": "load_bytes",
    "save bytes": "save_bytes",
    "load microseconds": "load_microseconds",
    "save microseconds": "save_microseconds",
}
"""Metrics by count. Bytes and microseconds are sums over all ranks."""
_BY_REASON: Final[Mapping[str, str]] = {
    "not offered": "not_offered_requests",
    "not saved": "not_saved_blocks",
    "not fetched": "not_fetched_requests",
    "": "incidents",
}
"""Metrics with a reason, by the part of a count before its colon; all other counts are incidents."""


class KvtierStats(KVConnectorStats):
    """Counts of incidents, by reason, since the last report."""

    def reset(self) -> None:
        self.data: dict[str, int] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        return KvtierStats(dict(Counter(self.data) + Counter(other.data)))

    def reduce(self) -> dict[str, int | float]:
        return dict(sorted(self.data.items()))

    def is_empty(self) -> bool:
        return not self.data


class NewCounts:
    """Turns counts that only grow into their differences between two reports."""

    def __init__(self) -> None:
        self._reported: Mapping[str, int] = {}

    def of(self, counts: Mapping[str, int]) -> KvtierStats:
        before, self._reported = self._reported, dict(counts)
        return KvtierStats({what: new for what, n in self._reported.items() if (new := n - before.get(what, 0))})


class KvtierMetrics(KVConnectorPromMetrics):
    """The counts as counters of Prometheus."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], engines: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, engines)
        self._counters: Final = {
            what: metric_types[prometheus_client.Counter](
                name=f"vllm:kvtier_{name}",
                documentation=f"kvtier: {what or 'other incidents'}.",
                labelnames=labelnames if what in _TOTALS else [*labelnames, "reason"],
            )
            for what, name in {**_TOTALS, **_BY_REASON}.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        labels = self.per_engine_labelvalues[engine_idx]
        for what, number in transfer_stats_data.items():
            kind, _, reason = what.partition(": ")
            if what in _TOTALS:
                self._counters[what].labels(*labels).inc(number)
            elif kind in _BY_REASON:
                self._counters[kind].labels(*labels, reason).inc(number)
            else:
                self._counters[""].labels(*labels, what).inc(number)
