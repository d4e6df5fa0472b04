"""What Python has no call for, of what can be done to mapped memory."""

import ctypes
import mmap
import os

_KEEP_SIZE, _PUNCH_HOLE = 1, 2

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def punch(fd: int, start: int, size: int) -> None:
    """Frees these pages of a file: they read as zeros. Raises OSError."""
    _checked(_libc.fallocate(fd, _PUNCH_HOLE | _KEEP_SIZE, start, size))


def protect(address: int, size: int) -> None:
    """Makes mapped pages writable. Raises OSError."""
    _checked(_libc.mprotect(address, size, mmap.PROT_READ | mmap.PROT_WRITE))


def _checked(result: int) -> None:
    if result:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
