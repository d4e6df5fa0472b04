"""Turns into a program of the caller, and leaves nothing of it behind: ``keeper.py DIRECTORY PROGRAM [ARGUMENT]...``.

A second process waits until the caller has ended, or has closed its end of standard input. Then it kills the program
and removes the directory.
"""

import os
import select
import shutil
import signal
import sys
from contextlib import suppress


def main(directory: str, *command: str) -> None:
    caller, program = os.pidfd_open(os.getppid()), os.pidfd_open(os.getpid())
    if os.fork():
        os.execv(command[0], command)
    os.setsid()  # the caller's terminal may signal its processes
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):  # their readers wait for the end of the program alone
        os.dup2(nowhere, stream)
    select.select([0, caller], [], [])
    with suppress(ProcessLookupError):
        signal.pidfd_send_signal(program, signal.SIGKILL)
    select.select([program], [], [])
    shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
