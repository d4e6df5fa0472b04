"""What outlives this process: descriptors that its service manager keeps, by name.

==============================  ==================================================================================
``arena/<cache>/<segment>``     the cache's ``control``, ``host`` and ``device``, or ``cuda`` for a device tier on a GPU
``arena/<cache>/about``         a sealed JSON file in memory: what the cache is, for one that no disk remembers
``sessions``                    see ``service/remnants.py``
==============================  ==================================================================================

The manager is systemd (``FileDescriptorStoreMax=``) or ``kvtierd --supervise``. Without one nothing is kept.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from kvtier.abi import attach
from kvtier.abi.spec import CacheSpec
from kvtierd.core.ids import Tier
from kvtierd.notify import Notifier, PassedFd
from kvtierd.service.budgets import Slots
from kvtierd.service.options import CacheOptions
from kvtierd.tiers.arena import Arena

SESSIONS: Final = "sessions"
_ARENA: Final = "arena"
_ABOUT: Final = "about"
_MAX_ABOUT_BYTES: Final = 1 << 20
_SEALED: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL

_log = logging.getLogger(__name__)


@dataclass(slots=True, frozen=True)
class About:
    """What a cache is. ``cuda``: what its segment of that name is, which cannot be told from the descriptor."""

    spec: CacheSpec
    slots: Slots
    options: CacheOptions
    cuda: attach.CudaMemory | None = None

    def to_json(self) -> bytes:
        slots = {str(tier): counts for tier, counts in self.slots.items()}
        fields = {"spec": self.spec.to_dict(), "slots": slots, "options": self.options.to_stored()}
        return json.dumps(fields | ({} if self.cuda is None else {"cuda": asdict(self.cuda)})).encode()

    @classmethod
    def from_json(cls, text: bytes) -> About:
        """Raises ValueError, KeyError, TypeError or AttributeError for what :meth:`to_json` did not write."""
        fields: dict[str, Any] = json.loads(text)
        slots = {Tier[tier.upper()]: tuple(map(int, counts)) for tier, counts in fields["slots"].items()}
        cuda = attach.CudaMemory(str(of["uuid"]), int(of["nbytes"])) if (of := fields.get("cuda")) else None
        return cls(CacheSpec.from_dict(fields["spec"]), slots, CacheOptions.from_stored(fields["options"]), cuda)


@dataclass(slots=True, frozen=True)
class KeptArena:
    """``fds``: by segment name, the holder's to close. ``cuda``: of the one of that name, if that is known."""

    fds: dict[str, int]
    cuda: attach.CudaMemory | None

    def close(self) -> None:
        for fd in self.fds.values():
            os.close(fd)
        self.fds.clear()


class Keeper:
    """Loop thread, and one thread at a time besides. ``passed``: what was kept for us; the keeper's from now on."""

    def __init__(self, notifier: Notifier, passed: Sequence[PassedFd]) -> None:
        self._notifier: Final = notifier
        self._caches: dict[str, dict[str, int]] = {}
        self._stored: dict[str, tuple[str, ...]] = {}
        self.sessions_fd: int | None = None
        for name, fd in ((one.name, one.fd) for one in passed):
            if not self._accept(name, fd):
                _log.warning("a kept descriptor is nothing we know or stands twice: let go name=%r", name)
                os.close(fd)
                notifier.forget(name)

    def _accept(self, name: str, fd: int) -> bool:
        if name == SESSIONS and self.sessions_fd is None:
            self.sessions_fd = fd
            return True
        kind, _, rest = name.partition("/")
        cache, _, segment = rest.rpartition("/")
        if kind != _ARENA or not cache or segment not in (*attach.SEGMENTS, _ABOUT):
            return False
        return self._caches.setdefault(cache, {}).setdefault(segment, fd) == fd

    @property
    def keeps(self) -> bool:
        """Whether anybody keeps anything for us."""
        return self._notifier.listens

    @property
    def has_memory(self) -> bool:
        """Whether a cache's memory was kept that nobody has taken yet."""
        return bool(self._caches)

    def abouts(self) -> dict[str, About]:
        """The caches whose arenas were kept and that say what they are."""
        found = {}
        for cache, fds in self._caches.items():
            about = _about(cache, fds)
            if about is not None:
                found[cache] = about
        return found

    def take(self, cache: str) -> KeptArena | None:
        """A kept arena: the caller's from now on. None: there is none."""
        fds = self._caches.pop(cache, None)
        if fds is None:
            return None
        self._stored[cache] = tuple(fds)
        about = _about(cache, fds) if attach.CUDA in fds else None
        if _ABOUT in fds:
            os.close(fds.pop(_ABOUT))
        return KeptArena(fds, about.cuda if about is not None else None)

    def store(self, cache: str, arena: Arena, about: About) -> None:
        """Has a new arena kept, instead of any that was kept under the name."""
        if not self.keeps:
            return
        self.forget(cache)
        described = _sealed(f"kvtier:{cache}:{_ABOUT}", about.to_json())
        try:
            fds = arena.kept_fds | {_ABOUT: described}
            for segment, fd in fds.items():
                self._notifier.store(_name(cache, segment), [fd])
        finally:
            os.close(described)
        self._stored[cache] = tuple(fds)

    def store_sessions(self, fd: int) -> None:
        """Instead of any that was kept."""
        self._notifier.forget(SESSIONS)
        self._notifier.store(SESSIONS, [fd])

    def forget(self, cache: str, only: str | None = None) -> None:
        """The cache's arena, if it is kept, or ``only`` one segment of it, is kept no longer than its own
        descriptors."""
        stored = self._stored.pop(cache, ())
        gone = [segment for segment in stored if only in (None, segment)]
        for segment in gone:
            self._notifier.forget(_name(cache, segment))
        if rest := tuple(segment for segment in stored if segment not in gone):
            self._stored[cache] = rest

    def forget_gpu(self) -> None:
        """No GPU memory is kept any longer: a successor makes it anew."""
        for cache in list(self._stored):
            self.forget(cache, attach.CUDA)

    def kept_on_gpu(self, uuid: str) -> int:
        """Bytes of that GPU (its uuid, 32 hex digits) that nobody has but those who kept them for us."""
        kept = (about.cuda for cache, about in self.abouts().items() if attach.CUDA in self._caches[cache])
        return sum(cuda.nbytes for cuda in kept if cuda is not None and cuda.uuid == uuid)

    def close(self) -> None:
        """Lets go of what nobody took, here and at the manager."""
        for cache in list(self._caches):
            _log.warning("a kept arena is let go: it is nobody's any more name=%s", cache)
            if (kept := self.take(cache)) is not None:
                kept.close()
            self.forget(cache)


def _about(cache: str, fds: Mapping[str, int]) -> About | None:
    try:
        return About.from_json(_read_sealed(fds[_ABOUT]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        _log.warning("a kept arena does not say what it is name=%s error=%r", cache, error)
        return None


def _name(cache: str, segment: str) -> str:
    return f"{_ARENA}/{cache}/{segment}"


def _sealed(name: str, content: bytes) -> int:
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.fchmod(fd, 0o400)
        os.write(fd, content)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALED)
    except OSError:
        os.close(fd)
        raise
    return fd


def _read_sealed(fd: int) -> bytes:
    if fcntl.fcntl(fd, fcntl.F_GET_SEALS) != _SEALED or (size := os.fstat(fd).st_size) > _MAX_ABOUT_BYTES:
        raise ValueError("not sealed, or too large")
    return os.pread(fd, size, 0)
