"""The daemon's addresses, and the names and limits of its attach socket, for both sides.

The attach socket is a ``SOCK_SEQPACKET`` unix socket beside the gRPC socket, because gRPC can neither pass file
descriptors nor identify its client. ``proto/kvtier/v1/session.proto`` has its messages. The token goes as metadata on
every gRPC call.
"""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Final

VERSION: Final = 1
MAX_MESSAGE: Final = 64 * 1024
"""Bytes. Receive with room for one more byte, to detect a longer answer instead of cutting it."""

RPC_SOCKET: Final = "kvtierd.sock"
ATTACH_SOCKET: Final = "attach.sock"
SESSION_METADATA_KEY: Final = "kvtier-session"
TRACE_METADATA_KEY: Final = "traceparent"
"""W3C Trace Context: the client's span, the parent of the daemon's span."""
ADDRESS_VARIABLE: Final = "KVTIER_ADDRESS"
DEFAULT_ADDRESS: Final = "/run/kvtier"
MAX_SOCKET_PATH: Final = 107
"""Bytes of a unix socket's path, the kernel's limit without the closing zero."""
HOST_PORT: Final = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9._-]+)):(\d{1,5})")
"""An address of TCP: an IPv6 address in brackets or another host, and a port, which may be above :data:`MAX_PORT`."""
MAX_PORT: Final = 65535

CONTROL: Final = "control"
HOST: Final = "host"
DEVICE: Final = "device"
CUDA: Final = "cuda"
SEGMENTS: Final = (CONTROL, HOST, DEVICE, CUDA)
"""Names of the descriptors, in the order they are sent. Segments that a cache lacks are left out. A device tier has one
segment: ``device`` (shared memory that stands in for a GPU's) or ``cuda``."""
DATA_TIERS: Final = (HOST, DEVICE)
"""Names of the tiers whose slots a client can map."""


def lease_secret(token: str, cache_id: int, lease_id: int) -> bytes:
    """Returns a ticket's proof that the session of its lease made it. Does not reveal the session's token."""
    return hashlib.blake2b(b"%d %d" % (cache_id, lease_id), key=bytes.fromhex(token), digest_size=16).digest()


class AddressError(ValueError):
    """A runtime directory whose path is too long for a socket."""


@dataclass(slots=True, frozen=True)
class CudaHandle:
    """The memory of a descriptor named ``cuda``: ``nbytes`` of the GPU with this uuid, 32 hex digits."""

    uuid: str
    nbytes: int


def socket_path(address: str | os.PathLike[str], name: str) -> str:
    """Returns the path of a socket in a runtime directory. Raises :class:`AddressError` if it is too long."""
    path = os.path.join(os.path.abspath(address), name)
    length = len(os.fsencode(path))
    if length > MAX_SOCKET_PATH:
        raise AddressError(
            f"socket path {path} has {length} bytes; the limit is {MAX_SOCKET_PATH}: use a shorter runtime directory"
        )
    return path


def is_loopback(host: str) -> bool:
    """Returns whether only this machine reaches the host. Another name than localhost may mean any address."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def default_address() -> str:
    """``$KVTIER_ADDRESS``, else ``/run/kvtier``."""
    return os.environ.get(ADDRESS_VARIABLE) or DEFAULT_ADDRESS
