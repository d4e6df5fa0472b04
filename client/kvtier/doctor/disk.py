"""The disk tier's directory: space, O_DIRECT, rights."""

from __future__ import annotations

import mmap
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvtier.doctor.finding import Finding, fail, ok, warn
from kvtier.words import size

ALIGNMENT: Final = 4096
FLOOR: Final = 1 << 30
FLOOR_PART: Final = 20
"""The daemon leaves free what is less, 1 GiB or a twentieth of the file system."""

_IN_MEMORY: Final = frozenset({"tmpfs", "ramfs"})
_ELSEWHERE: Final = "set disk_dir to a directory on a local ext4 or xfs; overlay and network file systems may refuse it"

SPACE: Final = "disk space"
DIRECT: Final = "O_DIRECT"


@dataclass(slots=True, frozen=True)
class Space:
    """Of the file system of ``directory``, or of its nearest ancestor that exists. ``taken``: by what is there already;
    None = it could not be seen."""

    directory: Path
    exists: bool
    free: int
    total: int
    taken: int | None


def read_space(directory: Path) -> Space:
    """Raises OSError where nothing above it can be seen."""
    existing = nearest(directory)
    status = os.statvfs(existing)
    taken = _taken(directory) if directory.exists() else 0
    return Space(
        directory, directory.exists(), status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize, taken
    )


def nearest(directory: Path) -> Path:
    """The directory, or its nearest ancestor that exists and may be looked at."""
    for each in (directory.absolute(), *directory.absolute().parents):
        try:
            if each.is_dir():
                return each
        except PermissionError:
            continue
    raise FileNotFoundError(directory)


def _taken(directory: Path) -> int | None:
    total = 0
    try:
        for path, _, files in os.walk(directory, onerror=_raise):
            total += sum(os.stat(os.path.join(path, name)).st_blocks * 512 for name in files)
    except OSError:
        return None
    return total


def _raise(error: OSError) -> None:
    raise error


def check_space(space: Space, needed: int) -> Finding:
    floor = min(FLOOR, space.total // FLOOR_PART)
    if space.taken is None:
        found = f"{space.directory} cannot be looked into: {size(space.free)} are free, how much it has is hidden"
        return warn(SPACE, found, "run kvtier doctor as root or as the daemon's user")
    left = space.free + space.taken - needed
    found = f"{space.directory}: {size(needed)} configured, {size(space.taken)} taken, {size(space.free)} free"
    if left >= floor:
        return ok(SPACE, found)
    short = size(floor - left)
    advice = f"free {short} there, make disk_bytes so much smaller, or set disk_dir to another file system"
    return fail(SPACE, f"{found}; {size(floor)} must stay free", advice)


@dataclass(slots=True, frozen=True)
class DirectIo:
    """``error``: why an aligned block could not be written past the page cache; None = it could. ``denied``: we may not
    write there at all, which says nothing of the daemon."""

    directory: Path
    filesystem: str
    error: str | None = None
    denied: bool = False


def probe_direct(directory: Path) -> DirectIo:
    """Writes one page to a file of its own and removes it. Raises OSError where no ancestor can be seen."""
    place = nearest(directory)
    filesystem = filesystem_of(place, Path("/proc/self/mountinfo").read_text())
    if not os.access(place, os.W_OK | os.X_OK):
        return DirectIo(place, filesystem, denied=True)
    try:
        _write_a_page(place)
    except OSError as error:
        return DirectIo(place, filesystem, error.strerror or str(error))
    return DirectIo(place, filesystem)


def _write_a_page(place: Path) -> None:
    fd, path = tempfile.mkstemp(prefix=".kvtier-doctor-", dir=place)
    os.close(fd)
    try:
        fd = os.open(path, os.O_RDWR | os.O_DIRECT)
        try:
            with mmap.mmap(-1, ALIGNMENT) as page:
                os.pwritev(fd, [page], 0)
                os.fdatasync(fd)
                os.preadv(fd, [page], 0)
        finally:
            os.close(fd)
    finally:
        os.unlink(path)


def filesystem_of(place: Path, mountinfo: str) -> str:
    """Its type, by ``/proc/self/mountinfo``; a later mount hides an earlier one at the same place."""
    best, kind = Path("/"), "?"
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        point = Path(before.split()[4].encode().decode("unicode_escape"))
        if place.is_relative_to(point) and point.is_relative_to(best):
            best, kind = point, after.split()[0]
    return kind


def check_direct(probe: DirectIo) -> Finding:
    where = f"{probe.directory} ({probe.filesystem})"
    if probe.denied:
        return warn(DIRECT, f"{where} is not ours to write to", "run kvtier doctor as root or as the daemon's user")
    if probe.filesystem in _IN_MEMORY:
        return warn(DIRECT, f"{where} is memory: what is there does not outlive the machine", _ELSEWHERE)
    if probe.error is None:
        return ok(DIRECT, f"{where} takes aligned writes past the page cache")
    return fail(DIRECT, f"{where} refuses it: {probe.error}", _ELSEWHERE)
