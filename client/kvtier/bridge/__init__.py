"""A cache's events in vLLM's form, published over ZeroMQ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from urllib.parse import urlsplit

from kvtier.abi.attach import is_loopback
from kvtier.errors import InvalidArgument


class Encoding(StrEnum):
    """The two encodings of an event: ``MAP`` of vLLM since June 2026 (its #42892), ``ARRAY`` of vLLM before."""

    MAP = "map"
    ARRAY = "array"


@dataclass(slots=True, frozen=True)
class Options:
    """Options of a bridge. Raises :class:`InvalidArgument` for an endpoint that is not allowed.

    Args:
        replay_endpoint: endpoint where readers request missed batches; None = none.
        insecure_any: allows endpoints that other hosts can reach.
        topic: the first frame of each batch. ``replay_topic``: also of answers to readers, as in vLLM since 0.26.
        group: publishes this window group only; None = all.
        tokens: publishes token ids. ``data_parallel_rank``: included in each batch.
        lora_names: an adapter's name by its LoRA id; other adapters are named by their id.
    """

    endpoint: str
    replay_endpoint: str | None = None
    insecure_any: bool = False
    topic: str = ""
    replay_topic: bool = True
    encoding: Encoding = Encoding.MAP
    group: int | None = None
    tokens: bool = False
    lora_names: Mapping[int, str] = field(default_factory=dict)
    data_parallel_rank: int = 0

    def __post_init__(self) -> None:
        self._check("endpoint", self.endpoint)
        if self.replay_endpoint is not None:
            self._check("replay_endpoint", self.replay_endpoint)

    def of_rank(self, further: int, cache: str) -> Options:
        """The options of the cache that is ``further`` places later. Like vLLM's ranks, each cache has its own port."""
        ends = [None if each is None else _offset(each, further) for each in (self.endpoint, self.replay_endpoint)]
        return replace(
            self,
            endpoint=ends[0] or self.endpoint,
            replay_endpoint=ends[1],
            topic=self.topic.replace("{cache}", cache),
            data_parallel_rank=self.data_parallel_rank + further,
        )

    def _check(self, name: str, endpoint: str) -> None:
        place = urlsplit(endpoint)
        if place.scheme == "ipc" and place.netloc + place.path:
            return
        host, colon, port = place.netloc.rpartition(":")
        if place.scheme != "tcp" or not host or not colon or not (port == "*" or port.isdecimal()):
            raise InvalidArgument(name, endpoint, "tcp://ADDRESS:PORT (PORT * = any free port) or ipc://PATH")
        if not self.insecure_any and not is_loopback(host.strip("[]")):
            limit = "a loopback address, because events go out unencrypted; --insecure-any allows any address"
            raise InvalidArgument(name, endpoint, limit)


def _offset(endpoint: str, further: int) -> str:
    place, _, port = endpoint.rpartition(":")
    if port.isdecimal():
        return f"{place}:{int(port) + further}"
    return f"{endpoint}_dp{further}" if further and endpoint.startswith("ipc:") else endpoint
