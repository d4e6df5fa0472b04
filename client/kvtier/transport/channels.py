"""This process's gRPC channels, and their state after a fork.

A single ``grpc.aio`` thread delivers the answers of all channels, and a forked child has none of its parent's threads.
While a channel of the parent exists in the child, gRPC assumes that this thread runs: a call on a new channel would
wait for ever, whatever its timeout. When the last of these channels is freed, the child waits for the thread's end, or
crashes.
"""

from __future__ import annotations

import ctypes
import os
from typing import Final
from weakref import WeakSet

import grpc
import grpc.aio

from kvtier.errors import CallerError

_OPTIONS: Final = (
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", 64 << 20),
    # Two clients of one process are two sessions: they must not share a connection, nor each other's back-off.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
)

_own: Final[WeakSet[grpc.aio.Channel]] = WeakSet()
_inherited: Final[list[grpc.aio.Channel]] = []


def open_channel(target: str, credentials: grpc.ChannelCredentials | None = None) -> grpc.aio.Channel:
    """Opens a channel, which the caller closes. ``credentials``: None = no TLS."""
    require_grpc()
    if credentials is None:
        channel = grpc.aio.insecure_channel(target, options=_OPTIONS)
    else:
        channel = grpc.aio.secure_channel(target, credentials, options=_OPTIONS)
    _own.add(channel)
    return channel


def require_grpc() -> None:
    """Raises :class:`CallerError` in a child process that was forked while its parent had a channel, open or not yet
    freed."""
    if _inherited:
        message = "this process was forked from one that had a client, and gRPC does not work in it: start it with exec"
        raise CallerError(f"{message}, as multiprocessing's spawn does, or before there is a client", reason="FORKED")


def _in_child() -> None:
    for channel in _own:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(channel))  # not even the end of the interpreter frees the channel
        _inherited.append(channel)
    _own.clear()


os.register_at_fork(after_in_child=_in_child)
