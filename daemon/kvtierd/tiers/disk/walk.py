"""A program of its own: reads every page of an LMDB environment, so that no other process dies of a damaged one.

LMDB has no checksums of its pages. What it finds in one it believes, or ends the process. Run by
:mod:`kvtierd.tiers.disk.sound` as a file, so nothing of the daemon is imported here.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import Final

import lmdb

REFUSED: Final = 3
"""Exit status where LMDB itself says that a page is damaged; standard error has the reason."""
_ENGINE: Final = 0
_MOST_DATABASES: Final = 1 << 12


def walk(path: str) -> None:
    """Raises lmdb.Error."""
    with lmdb.open(path, readonly=True, lock=False, create=False, max_dbs=_MOST_DATABASES, lib_version=_ENGINE) as env:
        with env.begin() as txn, txn.cursor() as at:
            names = [bytes(name) for name in at.iternext(values=False)]
        for name in names:
            database = env.open_db(name, create=False)
            with env.begin(db=database) as txn, txn.cursor() as at:
                for _ in at:
                    pass
        # A cursor does not see the list of free pages, which a commit reads; a copy does.
        with open(os.devnull, "wb") as nowhere, suppress(lmdb.IncompatibleError):  # of pages that nothing names
            env.copyfd(nowhere.fileno(), compact=True)


def main() -> int:
    try:
        walk(sys.argv[1])
    except lmdb.Error as error:
        print(error, file=sys.stderr)
        return REFUSED
    return 0


if __name__ == "__main__":
    sys.exit(main())
