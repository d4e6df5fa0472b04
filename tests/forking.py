"""Forks of the test's process, which has threads, and gRPC."""

import faulthandler
import gc
import os
import select
import signal
import warnings
from collections.abc import Callable

PATIENCE_S = 30.0


def in_child(work: Callable[[], int]) -> int:
    """The exit status that ``work`` gives in a forked child; 1 where it raises.

    The collector is off there: what earlier tests left of gRPC's servers cannot be freed in a child.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # forking a process with threads: what this is about
            child = os.fork()
        if child == 0:
            faulthandler.disable()  # whoever dies of a signal is asked for it
            status = 1
            try:
                status = work()
            finally:
                os._exit(status)
    finally:
        if collects:
            gc.enable()
    ended = os.pidfd_open(child)
    try:
        in_time = bool(select.select([ended], [], [], PATIENCE_S)[0])
    finally:
        os.close(ended)
        os.kill(child, signal.SIGKILL)  # of one that has ended nothing is left but its status
        _, status = os.waitpid(child, 0)
    assert in_time, "the child hangs"
    return os.waitstatus_to_exitcode(status)
