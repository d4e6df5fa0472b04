"""Where the log lies, and what is done about a directory that cannot be one.

The daemon can serve without its past, so a log that is damaged, of a later version, or none at all does not keep it
from starting, as a damaged state would: the directory is renamed, untouched, and a new log begins. Whoever asks for
what is gone with it is told so, as with a log that has been compacted. The newest few that were set aside are kept.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from kvtierd.event_log.clock import Clocks
from kvtierd.event_log.store import DAMAGE, EventStore
from kvtierd.tiers.base import DamagedDirectory, TierError
from kvtierd.tiers.disk.files import io_errors, make_private_directory, sync_directory
from kvtierd.tiers.disk.index import OPEN
from kvtierd.tiers.disk.superblock import MAGIC, SUPERBLOCK, read_superblock, write_superblock

_KIND: Final = "event-log"
_FIRST_FILES: Final = frozenset({f"{SUPERBLOCK}.new"})
_FILES: Final = _FIRST_FILES | {SUPERBLOCK, OPEN, "data.mdb", "lock.mdb"}
"""All that a log can have."""
KEPT_ASIDE: Final = 3
"""Logs that were set aside and stay, the newest: each is as large as a log may be. What is not one stays anyway."""

_HEAD: Final = f"{MAGIC} {_KIND} ".encode()

_log = logging.getLogger(__name__)


def open_store(
    path: Path, max_bytes: int, max_age_ns: int, clocks: Clocks, unfit: Callable[[EventStore], str | None]
) -> EventStore:
    """The log at ``path``, made where there is none. ``unfit``: why one that is sound cannot be gone on with, or None.

    Raises :class:`kvtierd.tiers.base.TierIOError`.
    """
    with io_errors(f"cannot use the event log {path}"):
        try:
            store = _open(path, max_bytes, max_age_ns, clocks)
            reason = unfit(store)
            if reason is None:
                return store
            store.close()
        except DamagedDirectory as error:
            reason = str(error)
        _set_aside(path, reason)
        return _open(path, max_bytes, max_age_ns, clocks)


def history_of(path: Path) -> int:
    """Which history the log at ``path`` says that it is of, 0 = none. Raises :class:`DamagedDirectory`,
    :class:`kvtierd.tiers.base.TierIOError`."""
    said = (read_superblock(path, _KIND) or {}).get("history", 0)
    if type(said) is not int or said < 0:
        raise DamagedDirectory(path, f"its {SUPERBLOCK} has a history {said!r}, not a number")
    return said


def note_history(path: Path, history: int) -> None:
    """From now on the log at ``path`` says that it is of it. Raises :class:`kvtierd.tiers.base.TierIOError`."""
    if history_of(path) != history:
        with io_errors(f"cannot use the event log {path}"):
            write_superblock(path, _KIND, {"history": history})


def _open(path: Path, max_bytes: int, max_age_ns: int, clocks: Clocks) -> EventStore:
    if path.exists() and read_superblock(path, _KIND) is None and (strange := _strange(path)):
        raise DamagedDirectory(path, f"holds {', '.join(strange[:3])} but no {SUPERBLOCK} of kvtier's")
    make_private_directory(path)
    if read_superblock(path, _KIND) is None:
        write_superblock(path, _KIND, {})
    history_of(path)  # one that cannot be read is damaged, which is to be known before anything is opened
    try:
        return EventStore(path, max_bytes, max_age_ns, clocks)
    except TierError as error:
        if isinstance(error.__cause__, DAMAGE):
            raise DamagedDirectory(path, str(error.__cause__)) from error
        raise


def _strange(path: Path) -> list[str]:
    if not path.is_dir():
        return ["a file"]
    return sorted(entry.name for entry in path.iterdir() if entry.name not in _FIRST_FILES)


def _set_aside(path: Path, reason: str) -> None:
    earlier = dict(_aside(path))
    aside = path.with_name(f"{path.name}.aside-{max(earlier, default=0) + 1}")
    path.rename(aside)
    sync_directory(path.parent)
    _log.warning("event log set aside, a new one begins now_at=%s why=%r", aside, reason)
    logs = [earlier[number] for number in sorted(earlier) if _is_log(earlier[number])]
    for old in logs[: max(0, len(logs) + _is_log(aside) - KEPT_ASIDE)]:
        _delete(old)


def _aside(path: Path) -> Iterator[tuple[int, Path]]:
    """What has been set aside, logs and others, by its number."""
    for entry in path.parent.iterdir():
        if numbered := re.fullmatch(rf"{re.escape(path.name)}\.aside-([1-9][0-9]{{0,8}})", entry.name):
            yield int(numbered[1]), entry


def _is_log(path: Path) -> bool:
    """Whether all that is there was made as a log, by whichever version, and is no use but to be looked at."""
    if not path.is_dir() or path.is_symlink():
        return False
    entries = list(path.iterdir())
    known = all(entry.name in _FILES and entry.is_file() and not entry.is_symlink() for entry in entries)
    return known and path / SUPERBLOCK in entries and (path / SUPERBLOCK).read_bytes().startswith(_HEAD)


def _delete(path: Path) -> None:
    try:
        for entry in path.iterdir():
            entry.unlink()
        path.rmdir()
    except OSError as error:
        _log.warning("a log that was set aside cannot be deleted path=%s why=%r", path, str(error))
    else:
        _log.info("a log that was set aside long ago is deleted path=%s", path)
