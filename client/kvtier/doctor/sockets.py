"""The runtime directory: path length, owner, rights."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvtier.abi import attach
from kvtier.doctor.disk import nearest
from kvtier.doctor.finding import Finding, fail, ok, warn

PATH: Final = "socket path"
RIGHTS: Final = "runtime directory"
_OTHERS: Final = 0o007


@dataclass(slots=True, frozen=True)
class RuntimeDir:
    """``mode``, ``uid``: None where it does not exist. ``open_to_us``: may connect to the sockets, None = there are
    none. ``makeable``: we could make it."""

    path: Path
    mode: int | None = None
    uid: int | None = None
    open_to_us: bool | None = None
    makeable: bool = False
    denied: bool = False


def read(path: Path) -> RuntimeDir:
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return RuntimeDir(path, makeable=os.access(nearest(path), os.W_OK | os.X_OK))
    except PermissionError:
        return RuntimeDir(path, denied=True)
    try:
        present = [name for name in (attach.ATTACH_SOCKET, attach.RPC_SOCKET) if os.path.lexists(path / name)]
        reachable = all(os.access(path / name, os.R_OK | os.W_OK) for name in present) if present else None
    except PermissionError:
        reachable = False
    if not os.access(path, os.X_OK):
        reachable = False
    return RuntimeDir(path, stat.S_IMODE(status.st_mode), status.st_uid, reachable)


def check_path(path: Path) -> Finding:
    try:
        longest = max(len(os.fsencode(attach.socket_path(path, name))) for name in _SOCKETS)
    except attach.AddressError as error:
        return fail(PATH, str(error), "set runtime_dir to a shorter path, such as /run/kvtier")
    return ok(PATH, f"{longest} of {attach.MAX_SOCKET_PATH} bytes")


_SOCKETS: Final = (attach.ATTACH_SOCKET, attach.RPC_SOCKET)


def check_rights(found: RuntimeDir) -> Finding:
    path = found.path
    if found.denied:
        return warn(RIGHTS, f"{path} cannot be looked at: permission denied", "run kvtier doctor as the daemon's user")
    if found.mode is None:
        if found.makeable:
            return ok(RIGHTS, f"{path} is not there yet; the daemon makes it")
        advice = f"RuntimeDirectory=kvtier in the unit, or: install -d -m 0750 -o kvtier -g kvtier {path}"
        return warn(RIGHTS, f"{path} is not there, and this user cannot make it", advice)
    what = f"{path} is {found.mode:04o}, of uid {found.uid}"
    if found.mode & _OTHERS:
        return warn(RIGHTS, f"{what}: everybody may look in", f"chmod 0750 {path}")
    if found.open_to_us is False:
        advice = "add this user to the group of the directory, and allow it with an [[allow]] rule or allow_uids"
        return warn(RIGHTS, f"{what}: this user may not connect", advice)
    return ok(RIGHTS, what if found.open_to_us else f"{what}; no daemon has its sockets there")
