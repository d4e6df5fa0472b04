"""Files of every kvtier directory: the superblock that marks it, the lock that keeps a second daemon out.

A superblock is a line ``kvtier <kind> <format version> <crc>`` and a JSON object. The crc is zlib's crc32, 8 hex
digits, over the line without the crc and the object's bytes, so that neither can be exchanged.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, Self

from kvtierd.tiers.base import DamagedDirectory, LockedDirectory, TierIOError

SUPERBLOCK: Final = "SUPERBLOCK"
_VERSIONS: Final = {"cache": 2}
"""Format versions of directories; 1 for all other kinds. Every change of a layout needs a new number."""
MAGIC: Final = "kvtier"
_MAX_BYTES: Final = 1 << 20
SET_ASIDE: Final = f"{SUPERBLOCK}.damaged"
"""A superblock that is no longer used. With this file, a directory without a superblock is still kvtier's."""

_WITHOUT: Final = {
    "state": "event ids go on above those of the event log, or from 1 where there is none; no block is lost",
    "disk": "nothing is lost",
}
"""The cost of starting with a directory of a kind without its superblock."""


class OtherDirectoryVersion(DamagedDirectory):
    """A directory of another version of kvtier, which may be sound."""


def format_version(kind: str) -> int:
    return _VERSIONS.get(kind, 1)


def write_superblock(directory: Path, kind: str, content: dict[str, Any]) -> None:
    """Replaces a superblock as a whole. Raises OSError, and :class:`TierIOError` if it is too large to be read back."""
    head = f"{MAGIC} {kind} {format_version(kind)}"
    body = json.dumps(content, indent=2, sort_keys=True).encode() + b"\n"
    whole = f"{head} {_crc(head, body)}\n".encode() + body
    if len(whole) > _MAX_BYTES:
        raise TierIOError(
            errno.EFBIG, f"{directory / SUPERBLOCK} would have {len(whole)} bytes of at most {_MAX_BYTES}"
        )
    _replace(directory / SUPERBLOCK, whole)


def read_superblock(directory: Path, kind: str) -> dict[str, Any] | None:
    """The content of a superblock; None if there is no file. Raises :class:`DamagedDirectory` for a damaged superblock,
    with the remedy if the directory can do without it."""
    try:
        return _read(directory, kind)
    except DamagedDirectory as error:
        if kind not in _WITHOUT:
            raise
        todo = f"if it is damaged and not of another version, rename it to {SET_ASIDE} ({_WITHOUT[kind]})"
        raise DamagedDirectory(directory, f"{error.why}; {todo}") from error


def set_aside(directory: Path) -> None:
    """Renames a superblock that is no longer used. Raises TierIOError."""
    with io_errors(f"cannot rename {directory / SUPERBLOCK}"), suppress(FileNotFoundError):
        (directory / SUPERBLOCK).replace(directory / SET_ASIDE)


def _read(directory: Path, kind: str) -> dict[str, Any] | None:
    with io_errors(f"cannot read {directory / SUPERBLOCK}"):
        try:
            with open(open_file(directory / SUPERBLOCK, os.O_RDONLY), "rb") as file:
                line, _, body = file.read(_MAX_BYTES).partition(b"\n")
        except (FileNotFoundError, NotADirectoryError):
            return None
        except NotAFile as error:
            raise DamagedDirectory(directory, f"its {SUPERBLOCK} is {error.kind}") from error
    words = line.decode("ascii", "replace").split(" ")
    if len(words) != 4 or words[0] != MAGIC:
        raise DamagedDirectory(directory, f"its {SUPERBLOCK} is not kvtier's")
    if words[1] != kind:
        raise DamagedDirectory(directory, f"its {SUPERBLOCK} is of a {words[1]}, not of a {kind}")
    if words[2] != str(format_version(kind)):
        raise OtherDirectoryVersion(
            directory, f"format version {words[2]}; this daemon reads version {format_version(kind)}"
        )
    if words[3] != _crc(" ".join(words[:3]), body):
        raise DamagedDirectory(directory, f"its {SUPERBLOCK} does not match its checksum")
    try:
        content = json.loads(body)
    except ValueError as error:
        raise DamagedDirectory(directory, f"its {SUPERBLOCK} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise DamagedDirectory(directory, f"its {SUPERBLOCK} is not a JSON object")
    return content


def _crc(head: str, body: bytes) -> str:
    return f"{zlib.crc32(body, zlib.crc32(head.encode())):08x}"


PRIVATE_DIR: Final = 0o700
PRIVATE_FILE: Final = 0o600

_NAMED_WITHIN_S: Final = 1.0
_LOOK_AGAIN_S: Final = 0.01


@contextmanager
def io_errors(what: str) -> Iterator[None]:
    """Turns the system's errors into :class:`TierIOError`. ``what``: describes the failed action."""
    try:
        yield
    except OSError as error:
        raise TierIOError(error.errno or 0, f"{what}: {error.strerror or error}") from error


class NotAFile(OSError):
    """A link, directory, FIFO, socket or device in place of kvtier's file or directory."""

    def __init__(self, path: Path, kind: str = "not a regular file") -> None:
        super().__init__(errno.EINVAL, f"{path} is {kind}")
        self.kind: Final = kind


_LINK: Final = "a symbolic link"
_KINDS: Final = {errno.ELOOP: _LINK, errno.ENXIO: "not a regular file", errno.EISDIR: "not a regular file"}
"""Error numbers of an open: links, and FIFOs, sockets and directories that are opened for writing."""


def open_file(path: Path, flags: int) -> int:
    """Opens a regular file, or makes a file that only its owner may use. Never waits, as an open of a FIFO would.

    Raises:
        NotAFile: nothing was changed, not even behind a link.
        OSError: it cannot be opened.
    """
    try:
        fd = os.open(path, flags | os.O_NONBLOCK | os.O_NOFOLLOW, PRIVATE_FILE)
    except OSError as error:
        if error.errno not in _KINDS:
            raise
        raise NotAFile(path, _KINDS[error.errno]) from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise NotAFile(path)
    return fd


def exposure(directory: Path) -> str | None:
    """Describes a directory that users besides root and this process's user may write to. Returns None if only these
    two may, or if the directory is missing."""
    try:
        status = directory.stat()
    except OSError:
        return None
    mode = stat.S_IMODE(status.st_mode)
    if status.st_uid in (0, os.geteuid()) and not mode & (stat.S_IWGRP | stat.S_IWOTH):
        return None
    return f"others may write to {directory}: it has the mode {mode:04o} and belongs to uid {status.st_uid}"


def allocate(path: Path, nbytes: int, flags: int = 0) -> None:
    """Allocates the first ``nbytes`` of a file, without a change to its content. ``flags``: of the open. Raises
    OSError."""
    with open(open_file(path, os.O_RDWR | flags), "r+b") as file:
        os.posix_fallocate(file.fileno(), 0, nbytes)
        os.fsync(file)


def refuse_link(path: Path) -> None:
    """Raises :class:`NotAFile` for a link in place of a file or directory inside of a kvtier directory."""
    if path.is_symlink():
        raise NotAFile(path, _LINK)


def sync_directory(path: Path) -> None:
    """Makes entries of ``path`` that were created, renamed or removed durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_private_directory(path: Path) -> None:
    """Creates ``path`` and its missing parents, private whatever the umask. An existing directory stays as it is."""
    if path.is_dir():
        return
    make_private_directory(path.parent)
    try:
        path.mkdir(PRIVATE_DIR)
    except FileExistsError:
        if path.is_dir():  # another daemon was quicker; the lock decides between the daemons
            return
        raise
    path.chmod(PRIVATE_DIR)
    sync_directory(path.parent)


def _replace(path: Path, content: bytes) -> None:
    """Replaces the content of a file. After a crash ``path`` has either its former content or all of ``content``. The
    former content stays beside it as ``.new``, to be overwritten the next time, so that a full disk has room."""
    temporary, before = path.with_name(path.name + ".new"), path.with_name(path.name + ".old")
    fd = open_file(temporary, os.O_WRONLY | os.O_CREAT)
    if os.fstat(fd).st_nlink > 1:  # after a crash of the system it may be the same file as ``path``
        os.close(fd)
        temporary.unlink()
        fd = open_file(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    with open(fd, "wb") as file:
        file.write(content)
        file.truncate()
        file.flush()
        os.fsync(fd)
    before.unlink(missing_ok=True)
    with suppress(FileNotFoundError):  # the first time
        os.link(path, before)
    temporary.rename(path)
    with suppress(FileNotFoundError):
        before.rename(temporary)
    sync_directory(path.parent)


class DirectoryLock:
    """An exclusive hold on a directory while the process lives: flock on a file that names the holder."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    @classmethod
    def take(cls, path: Path) -> Self:
        """Takes the lock file ``path``. Raises :class:`LockedDirectory`, with the file unchanged; OSError."""
        fd = open_file(path, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = _holder(fd)
            os.close(fd)
            raise LockedDirectory(path.parent, pid) from None
        written = os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        os.ftruncate(fd, written)  # after the write: on a full disk the file keeps its room
        return cls(fd)

    def release(self) -> None:
        os.close(self._fd)


def _holder(fd: int) -> int:
    """The pid of the holder; 0 = unknown. Waits for a new holder to write its pid: until then the file is empty, or
    names a process that is gone."""
    until = time.monotonic() + _NAMED_WITHIN_S
    while not _runs(pid := _read_pid(fd)) and time.monotonic() < until:
        time.sleep(_LOOK_AGAIN_S)
    return pid


def _runs(pid: int) -> bool:
    return pid > 0 and Path(f"/proc/{pid}").exists()


def _read_pid(fd: int) -> int:
    text = os.pread(fd, 32, 0).strip()
    return int(text) if text.isdigit() else 0
