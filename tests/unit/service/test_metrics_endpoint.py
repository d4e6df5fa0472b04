"""The metrics' HTTP endpoint and clients that say nothing, little, or come in numbers."""

from __future__ import annotations

import socket
import time
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import ExitStack

import pytest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvtierd.service.metrics import endpoint as module
from kvtierd.service.metrics.endpoint import MOST_CONNECTIONS, MetricsEndpoint

PATIENCE_S = 20.0
REQUEST = b"GET /metrics HTTP/1.0\r\n\r\n"


class OneNumber(Collector):
    def collect(self) -> Iterable[Metric]:
        return [GaugeMetricFamily("a_number", "One", value=1)]


@pytest.fixture
def endpoint() -> Iterator[MetricsEndpoint]:
    served = MetricsEndpoint("127.0.0.1", 0, OneNumber())
    yield served
    served.stop()


def give(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """So long a client may be silent."""
    monkeypatch.setattr(module, "SILENT_S", seconds)
    monkeypatch.setattr(module._Handler, "timeout", seconds)


def connected(endpoint: MetricsEndpoint) -> socket.socket:
    return socket.create_connection(("127.0.0.1", endpoint.port), timeout=PATIENCE_S)


def answer(connection: socket.socket) -> bytes:
    with connection.makefile("rb") as file:
        return file.read()


def test_one_that_says_nothing_holds_up_nobody_else(endpoint: MetricsEndpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    give(monkeypatch, 10 * PATIENCE_S)
    url = f"http://127.0.0.1:{endpoint.port}/metrics"
    with connected(endpoint), urllib.request.urlopen(url, timeout=PATIENCE_S) as answered:
        assert b"a_number 1.0" in answered.read()


def test_one_that_says_little_at_a_time_is_hung_up_on(
    endpoint: MetricsEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    give(monkeypatch, 0.5)
    patience = time.monotonic() + PATIENCE_S
    with connected(endpoint) as slow:
        slow.settimeout(0.05)
        with pytest.raises((ConnectionError, EOFError)):
            while time.monotonic() < patience:
                slow.send(b"G")
                try:
                    told = slow.recv(1)
                except TimeoutError:
                    continue
                assert told == b""
                raise EOFError


def test_too_many_wait_for_one_of_them_to_end(endpoint: MetricsEndpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    give(monkeypatch, 10 * PATIENCE_S)
    with ExitStack() as stack:
        silent = [stack.enter_context(connected(endpoint)) for _ in range(MOST_CONNECTIONS)]
        waiting = stack.enter_context(connected(endpoint))
        waiting.sendall(REQUEST)
        waiting.settimeout(0.3)
        with pytest.raises(TimeoutError):
            waiting.recv(1)
        silent[0].close()
        waiting.settimeout(PATIENCE_S)
        assert b"a_number 1.0" in answer(waiting)
