"""Whether an LMDB environment can be opened without the end of this process.

LMDB aborts where a page is not what it was written as. A daemon that is started again after that would die of the same
page, for ever. So an environment that was not closed, whatever ended its process, is first walked by another one
(:mod:`kvtierd.tiers.disk.walk`): only what a walk survives is opened. A damaged page then costs one crash at most.

What says that it was closed is a file, ``CLOSED``, which goes before it is opened: a full disk can keep one from being
made, and that costs a walk.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Final

from kvtierd.tiers.base import DamagedDirectory, TierIOError
from kvtierd.tiers.disk import walk
from kvtierd.tiers.disk.files import PRIVATE_FILE, io_errors, sync_directory

CLOSED: Final = "CLOSED"
_DATA: Final = "data.mdb"
_DEATHS: Final = frozenset({signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL})
"""What a process does to itself; others are sent to it."""
_LEAST_S: Final = 60.0
_BYTES_PER_S: Final = 4 << 20
"""A slow disk reads more; pages that lead in circles are read for ever."""

_log = logging.getLogger(__name__)


def before_opening(path: Path) -> None:
    """Comes before an environment at ``path`` is opened, which need not exist yet.

    Raises :class:`DamagedDirectory` where it must not be, :class:`TierIOError` where that is not known.
    """
    with io_errors(f"cannot open {path}"):
        if (path / CLOSED).exists():
            (path / CLOSED).unlink()
            sync_directory(path)
            return
        if not (path / _DATA).is_file() or not (path / _DATA).stat().st_size:
            return
    _log.info("walking an environment that was not closed path=%s", path)
    _walk_elsewhere(path)


def after_closing(path: Path) -> None:
    """Comes after an environment has been closed in which all is well."""
    try:
        (path / CLOSED).touch(PRIVATE_FILE)
    except OSError as error:
        _log.warning("not noted as closed, so it is walked before it is opened again path=%s why=%r", path, str(error))


def _walk_elsewhere(path: Path) -> None:
    limit_s = _LEAST_S + (path / _DATA).stat().st_size / _BYTES_PER_S
    # Without site-packages' hooks, which take most of an interpreter's start; the paths that they added are passed on.
    command = [sys.executable, "-S", "-P", walk.__file__, str(path)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=environment,
            timeout=limit_s,
            text=True,
            errors="replace",
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise TierIOError(0, f"{path}: its pages could not be read within {limit_s:.0f} s") from error
    except OSError as error:
        _log.warning("opened without a walk, which cannot be started path=%s why=%r", path, str(error))
        return
    said = " ".join(done.stderr.split()) or "it said nothing"
    if -done.returncode in _DEATHS:
        died_of = signal.Signals(-done.returncode).name
        raise DamagedDirectory(path, f"LMDB cannot read its pages without the end of the process ({died_of}): {said}")
    if done.returncode == walk.REFUSED:
        raise DamagedDirectory(path, f"its pages are damaged: {said}")
    if done.returncode:
        raise TierIOError(0, f"{path}: its pages could not be walked, status {done.returncode}: {said}")
