"""What a daemon's metrics endpoint says, read as Prometheus reads it."""

import asyncio
import http.client
import re
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field

from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from tests.integration.daemon import DaemonProcess

LISTEN = ("--metrics-listen", "127.0.0.1:0")


def port_of(daemon: DaemonProcess) -> int:
    """Of the endpoint of its last start."""
    ports = re.findall(r"serving metrics address=\S+ port=(\d+)", daemon.log)
    return int(ports[-1])


def asked(daemon: DaemonProcess, path: str, method: str = "GET") -> tuple[int, str]:
    """Status and body of the answer to one request."""
    with closing(http.client.HTTPConnection("127.0.0.1", port_of(daemon), timeout=10)) as connection:
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


def text_of(daemon: DaemonProcess) -> str:
    status, text = asked(daemon, "/metrics")
    assert status == 200, text
    return text


@dataclass(frozen=True)
class Scrape:
    text: str = field(repr=False)
    families: Mapping[str, Metric] = field(repr=False)

    def values(self, name: str, **labels: str) -> dict[tuple[str, ...], float]:
        """Of the samples of this name with these labels: their values by the values of their other labels."""
        samples = [sample for family in self.families.values() for sample in family.samples if sample.name == name]
        return {
            tuple(value for key, value in sorted(sample.labels.items()) if key not in labels): sample.value
            for sample in samples
            if all(sample.labels.get(key) == value for key, value in labels.items())
        }

    def value(self, name: str, **labels: str) -> float:
        """The sum of them; 0 where there is none."""
        return sum(self.values(name, **labels).values())


async def scrape(daemon: DaemonProcess) -> Scrape:
    text = await asyncio.to_thread(text_of, daemon)
    return Scrape(text, {family.name: family for family in text_string_to_metric_families(text)})
