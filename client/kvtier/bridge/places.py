"""Where the bridge's sockets may be: by default where nobody from outside can reach them."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

import zmq

from kvtier.errors import InvalidArgument

_OWNER_ONLY = 0o177


def check(field: str, endpoint: str, *, anywhere: bool) -> None:
    """Raises :class:`kvtier.errors.InvalidArgument` for what is neither ``tcp://`` a loopback address, with
    ``anywhere`` any address, nor ``ipc://`` a path."""
    place = urlsplit(endpoint)
    if place.scheme == "ipc" and (place.netloc + place.path):
        return
    host, colon, port = place.netloc.rpartition(":")
    if place.scheme != "tcp" or not host or not colon or not (port == "*" or port.isdecimal()):
        raise InvalidArgument(field, endpoint, "tcp://ADDRESS:PORT (PORT * = any that is free) or ipc://PATH")
    if not anywhere and not _is_loopback(host):
        limit = "a loopback address, for events go out unencrypted to whoever asks; --insecure-any allows any address"
        raise InvalidArgument(field, endpoint, limit)


def bound(socket: zmq.Socket[bytes], field: str, endpoint: str) -> str:
    """Binds it; where it is now, with the port that was chosen. Files of ``ipc://`` are their owner's alone.

    Raises :class:`kvtier.errors.InvalidArgument` where that cannot be.
    """
    try:
        with _private_files():
            socket.bind(endpoint)
    except zmq.ZMQError as error:
        raise InvalidArgument(field, endpoint, f"an address that can be bound: {error.strerror}") from error
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)


@contextmanager
def _private_files() -> Iterator[None]:
    mask = os.umask(_OWNER_ONLY)
    try:
        yield
    finally:
        os.umask(mask)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:  # a name or an interface: it may be anywhere
        return False
