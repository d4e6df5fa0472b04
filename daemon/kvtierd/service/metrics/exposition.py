"""From numbers to the families of prometheus_client. Runs in the thread that serves scrapes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from typing import Any, Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from kvtierd.service.metrics.counting import Counts
from kvtierd.service.metrics.reading import Sample
from kvtierd.service.metrics.table import METRICS, Kind, Metric

READ_S: Final = 5.0
"""How long a scrape waits for the loop, which then has more to worry about than being watched."""


class LoopCollector(Collector):
    """Has the loop read all numbers, once a scrape. Raises TimeoutError where it does not come to it."""

    def __init__(self, loop: asyncio.AbstractEventLoop, take: Callable[[], Coroutine[Any, Any, list[Sample]]]) -> None:
        self._loop = loop
        self._take = take

    def describe(self) -> Iterator[Family]:
        return families(())

    def collect(self) -> Iterator[Family]:
        reading = asyncio.run_coroutine_threadsafe(self._take(), self._loop)
        try:
            return families(reading.result(READ_S))
        finally:
            reading.cancel()


def families(samples: Iterable[Sample]) -> Iterator[Family]:
    """Every metric there is, also those without a sample, so that a dashboard finds all of them."""
    made = {metric: _family(metric) for metric in METRICS}
    for metric, labels, value in samples:
        family = made[metric]
        if isinstance(value, Counts):
            assert isinstance(family, HistogramMetricFamily)
            family.add_metric(labels, value.buckets, value.total)
        else:
            assert isinstance(family, GaugeMetricFamily | CounterMetricFamily)
            family.add_metric(labels, float(value))
    return iter(made.values())


def _family(metric: Metric) -> Family:
    return _FAMILIES[metric.kind](metric.name, metric.help, labels=metric.labels)


_FAMILIES: Final[Mapping[Kind, Callable[..., Family]]] = {
    Kind.GAUGE: GaugeMetricFamily,
    Kind.COUNTER: CounterMetricFamily,
    Kind.HISTOGRAM: HistogramMetricFamily,
}
