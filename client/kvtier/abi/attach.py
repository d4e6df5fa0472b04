"""The protocol of the attach socket: a client begins a session and gets the memory of caches.

A ``SOCK_SEQPACKET`` unix socket beside the gRPC socket, because gRPC can neither pass file descriptors nor identify its
client. Each message is one UTF-8 JSON object of at most 64 KiB with exactly the fields below::

    -> {"op": "hello", "version": 1, "token": <32 hex digits of an earlier session, or absent>}
    <- {"ok": true, "token": <hex>, "session_id": n, "resumed": bool, "epoch": n, "boot": n, "pid": n, "history": n}
    -> {"op": "map", "cache_id": n, "write": bool}
    <- {"ok": true, "fds": ["control", "host", "device"]}    and these descriptors, in this order, by SCM_RIGHTS
    or <- {"ok": true, "fds": ["control", "host", "cuda"], "cuda": {"uuid": <32 hex digits>, "bytes": n}}
    or <- {"ok": true, "fds": ["control", "host"], "unmapped": {"device": "<why not>"}}
    either <- {"ok": false, "reason": "...", "message": "..."}
    -> {"op": "forget", "token": <of an earlier session>}    the client no longer touches its memory; not answered
    -> {"op": "bye"}    ends the session and its leases; the daemon hangs up

The token goes as metadata on every gRPC call. After a refused hello the daemon closes the connection.

``cuda`` is memory of the GPU with this uuid, ``bytes`` long. Its descriptor is a handle for
``cuMemImportFromShareableHandle``, not for mmap. The handle has no read-only form, so a map without ``write`` does not
get it. ``unmapped`` gives the reason for each tier of the cache without a descriptor. Both fields may be absent.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

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

CONTROL: Final = "control"
HOST: Final = "host"
DEVICE: Final = "device"
CUDA: Final = "cuda"
SEGMENTS: Final = (CONTROL, HOST, DEVICE, CUDA)
"""Names of the descriptors, in the order they are sent. Segments that a cache lacks are left out. A device tier has one
segment: ``device`` (shared memory that stands in for a GPU's) or ``cuda``."""
DATA_TIERS: Final = (HOST, DEVICE)
"""Names of the tiers whose slots a client can map."""

_HEX: Final = re.compile(r"[0-9a-f]{32}")
_MAX_U64: Final = 2**64 - 1


def lease_secret(token: str, cache_id: int, lease_id: int) -> bytes:
    """Returns a ticket's proof that the session of its lease made it. Does not reveal the session's token."""
    return hashlib.blake2b(b"%d %d" % (cache_id, lease_id), key=bytes.fromhex(token), digest_size=16).digest()


class AttachProtocolError(ValueError):
    """A message that breaks the protocol. ``reason`` is stable and machine readable."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message


class AddressError(ValueError):
    """A runtime directory whose path is too long for a socket."""


@dataclass(slots=True, frozen=True)
class Hello:
    """First message of a connection. ``token`` resumes an earlier session of the same process."""

    token: str | None = None
    version: int = VERSION


@dataclass(slots=True, frozen=True)
class Map:
    """Asks for a cache's segments. ``write``: with writable data segments; ``control`` is never writable."""

    cache_id: int
    write: bool


@dataclass(slots=True, frozen=True)
class Forget:
    """Tells a restarted daemon that this process no longer copies to or from slots of an earlier session. Until then
    the daemon keeps the slots from other clients. ``token``: of the earlier session. Not answered."""

    token: str


@dataclass(slots=True, frozen=True)
class Bye:
    """Ends the session. Without this message a hang-up ends the connection only: the session waits for its process."""


@dataclass(slots=True, frozen=True)
class Welcome:
    token: str
    session_id: int
    resumed: bool
    epoch: int
    boot: int
    pid: int
    history: int
    """Identifies the daemon's sequence of event ids: another history has other events under the same ids."""


@dataclass(slots=True, frozen=True)
class CudaHandle:
    """The memory of a descriptor named ``cuda``: ``nbytes`` of the GPU with this uuid, 32 hex digits."""

    uuid: str
    nbytes: int


@dataclass(slots=True, frozen=True)
class MapReply:
    """Names of the descriptors that came with the message, in their order.

    ``cuda``: the memory of the descriptor ``cuda``. ``unmapped``: the reason for each tier without a descriptor.
    """

    fds: tuple[str, ...]
    cuda: CudaHandle | None = None
    unmapped: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True, frozen=True)
class Failure:
    reason: str
    message: str


Request = Hello | Map | Forget | Bye
Reply = Welcome | MapReply | Failure


def socket_path(address: str | os.PathLike[str], name: str) -> str:
    """Returns the path of a socket in a runtime directory. Raises :class:`AddressError` if it is too long."""
    path = os.path.join(os.path.abspath(address), name)
    length = len(os.fsencode(path))
    if length > MAX_SOCKET_PATH:
        raise AddressError(
            f"socket path {path} has {length} bytes; the limit is {MAX_SOCKET_PATH}: use a shorter runtime directory"
        )
    return path


def default_address() -> str:
    """``$KVTIER_ADDRESS``, else ``/run/kvtier``."""
    return os.environ.get(ADDRESS_VARIABLE) or DEFAULT_ADDRESS


def encode(message: Request | Reply) -> bytes:
    """Returns the message's bytes. Raises :class:`AttachProtocolError` if they are too long."""
    return _checked_length(json.dumps(_fields(message), separators=(",", ":")).encode())


def _fields(message: Request | Reply) -> dict[str, Any]:
    match message:
        case Hello(token=None):
            return {"op": "hello", "version": message.version}
        case Hello():
            return {"op": "hello", "version": message.version, "token": message.token}
        case Map():
            return {"op": "map", "cache_id": message.cache_id, "write": message.write}
        case Forget():
            return {"op": "forget", "token": message.token}
        case Bye():
            return {"op": "bye"}
        case Welcome():
            return {"ok": True} | {name: getattr(message, name) for name in _WELCOME_FIELDS}
        case MapReply():
            return {"ok": True, "fds": list(message.fds)} | _said_of_data(message)
        case Failure():
            return {"ok": False, "reason": message.reason, "message": message.message}


def _said_of_data(message: MapReply) -> dict[str, Any]:
    cuda = message.cuda
    said: dict[str, Any] = {} if cuda is None else {"cuda": {"uuid": cuda.uuid, "bytes": cuda.nbytes}}
    return said | ({"unmapped": dict(message.unmapped)} if message.unmapped else {})


def decode_request(data: bytes) -> Request:
    """Decodes a client's message, for the daemon.

    Raises :class:`AttachProtocolError`, reason BAD_MESSAGE, TOO_LONG, UNKNOWN_OP, BAD_FIELD or BAD_VERSION.
    """
    fields = _object(data)
    op = fields.pop("op", None)
    if op == "hello":
        # The version is checked first, so that a newer client gets a clear error.
        if _is_u64(fields.get("version")) and fields["version"] != VERSION:
            side = "daemon" if fields["version"] > VERSION else "client"
            said = f"version {fields['version']}: this daemon speaks version {VERSION}; upgrade the {side}"
            raise AttachProtocolError("BAD_VERSION", said)
        return Hello(**_checked(fields, _HELLO_FIELDS, optional=("token",)))
    if op == "map":
        return Map(**_checked(fields, _MAP_FIELDS))
    if op == "forget":
        return Forget(**_checked(fields, _FORGET_FIELDS))
    if op == "bye":
        return Bye(**_checked(fields, {}))
    raise AttachProtocolError("UNKNOWN_OP", f"op {_shown(op)}: must be hello, map, forget or bye")


def decode_welcome(data: bytes) -> Welcome | Failure:
    """Decodes the answer to a hello, for the client. Raises :class:`AttachProtocolError`."""
    fields, failure = _reply(data)
    return failure or Welcome(**_checked(fields, _WELCOME_FIELDS))


def decode_mapped(data: bytes) -> MapReply | Failure:
    """Decodes the answer to a map, for the client. Raises :class:`AttachProtocolError`."""
    fields, failure = _reply(data)
    if failure is not None:
        return failure
    checked = _checked(fields, _MAPPED_FIELDS, optional=("cuda", "unmapped"))
    fds, unmapped = tuple(checked["fds"]), checked.get("unmapped", {})
    cuda = _cuda_memory(checked["cuda"]) if "cuda" in checked else None
    if (cuda is not None) != (CUDA in fds):
        raise AttachProtocolError("BAD_FIELD", "field cuda must come with the descriptor cuda, and only with it")
    came = {DEVICE if name == CUDA else name for name in fds}
    for tier in unmapped:
        if tier in came:
            raise AttachProtocolError("BAD_FIELD", f"field unmapped names {tier}, of which a descriptor came")
    return MapReply(fds, cuda, unmapped)


def _cuda_memory(said: dict[str, Any]) -> CudaHandle:
    fields = _checked(said, _CUDA_FIELDS)
    return CudaHandle(fields["uuid"], fields["bytes"])


def _reply(data: bytes) -> tuple[dict[str, Any], Failure | None]:
    fields = _object(data)
    ok = fields.pop("ok", None)
    if ok is False:
        return {}, Failure(**_checked(fields, _FAILURE_FIELDS))
    if ok is not True:
        raise AttachProtocolError("BAD_FIELD", f"field ok is {_shown(ok)}: must be true or false")
    return fields, None


def _is_u64(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MAX_U64


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_hex(value: object) -> bool:
    return isinstance(value, str) and _HEX.fullmatch(value) is not None


def _are_segments(value: object) -> bool:
    if not isinstance(value, list) or value[:1] != [CONTROL] or value != [s for s in SEGMENTS if s in value]:
        return False
    return not (DEVICE in value and CUDA in value)


def _are_reasons(value: object) -> bool:
    return isinstance(value, dict) and all(tier in DATA_TIERS and _is_text(why) for tier, why in value.items())


@dataclass(slots=True, frozen=True)
class _Kind:
    accepts: Callable[[object], bool]
    limit: str


_U64: Final = _Kind(_is_u64, f"an integer from 0 to {_MAX_U64}")
_SIZE: Final = _Kind(lambda value: _is_u64(value) and value != 0, f"an integer from 1 to {_MAX_U64}")
_BOOL: Final = _Kind(lambda value: isinstance(value, bool), "true or false")
_TEXT: Final = _Kind(_is_text, "text")
_HEX_KIND: Final = _Kind(_is_hex, "32 lower-case hex digits")
_FDS: Final = _Kind(_are_segments, "control, then host and either device or cuda where the cache has them")
_OBJECT: Final = _Kind(lambda value: isinstance(value, dict), "an object")
_REASONS: Final = _Kind(_are_reasons, f"an object with a text for {' or '.join(DATA_TIERS)}")

_HELLO_FIELDS: Final[Mapping[str, _Kind]] = {"version": _U64, "token": _HEX_KIND}
_MAP_FIELDS: Final[Mapping[str, _Kind]] = {"cache_id": _U64, "write": _BOOL}
_FORGET_FIELDS: Final[Mapping[str, _Kind]] = {"token": _HEX_KIND}
_WELCOME_FIELDS: Final[Mapping[str, _Kind]] = {
    "token": _HEX_KIND,
    "session_id": _U64,
    "resumed": _BOOL,
    "epoch": _U64,
    "boot": _U64,
    "pid": _U64,
    "history": _U64,
}
_MAPPED_FIELDS: Final[Mapping[str, _Kind]] = {"fds": _FDS, "cuda": _OBJECT, "unmapped": _REASONS}
_CUDA_FIELDS: Final[Mapping[str, _Kind]] = {"uuid": _HEX_KIND, "bytes": _SIZE}
_FAILURE_FIELDS: Final[Mapping[str, _Kind]] = {"reason": _TEXT, "message": _TEXT}


def _checked(fields: dict[str, Any], kinds: Mapping[str, _Kind], optional: Collection[str] = ()) -> dict[str, Any]:
    for name, value in fields.items():
        if name not in kinds:
            raise AttachProtocolError("BAD_FIELD", f"unknown field {_shown(name)}")
        if not kinds[name].accepts(value):
            raise AttachProtocolError("BAD_FIELD", f"field {name} is {_shown(value)}: must be {kinds[name].limit}")
    for name in kinds:
        if name not in fields and name not in optional:
            raise AttachProtocolError("BAD_FIELD", f"field {name} is missing")
    return fields


def _object(data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(_checked_length(data).decode(), object_pairs_hook=_without_duplicates)
    except AttachProtocolError:
        raise
    except (ValueError, RecursionError) as error:
        raise AttachProtocolError("BAD_MESSAGE", f"not a JSON object in UTF-8: {_shown(str(error))}") from error
    if not isinstance(value, dict):
        raise AttachProtocolError("BAD_MESSAGE", f"a JSON {type(value).__name__}: must be an object")
    return value


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise AttachProtocolError("BAD_MESSAGE", "a field stands twice in one object")
    return fields


def _checked_length(data: bytes) -> bytes:
    if len(data) > MAX_MESSAGE:
        raise AttachProtocolError("TOO_LONG", f"{len(data)} bytes or more: a message has at most {MAX_MESSAGE}")
    return data


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
