"""What a client may and may not do to a segment is tested from another process, on the real descriptors."""

import fcntl
import gc
import mmap
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvtier.abi.control import STATE_OFFSET, ArenaState
from kvtier.abi.layout import first_generation, is_ready
from kvtierd.core.ids import SlotId, Tier
from kvtierd.tiers import memfd
from kvtierd.tiers.arena import Arena
from kvtierd.tiers.base import TierConfigError
from kvtierd.tiers.memfd import Memfd
from tests.mappings import resident_bytes
from tests.unit.tiers.arena_helpers import GROUP, make_arena, mapped_segments, run_client

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="becoming another uid takes root")


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = make_arena()
    yield arena
    arena.close()


@pytest.fixture
def segment() -> Iterator[Memfd]:
    segment = Memfd.create("kvtier:unit:segment", 1 << 20)
    yield segment
    segment.close()


@pytest.mark.parametrize("tier", [Tier.DEVICE, Tier.HOST])
def test_a_generation_is_odd_exactly_while_written(arena: Arena, tier: Tier) -> None:
    slot, other = SlotId(1), SlotId(2)
    assert not is_ready(arena.generation(tier, GROUP, slot))
    seen = [arena.generation(tier, GROUP, slot)]
    for _ in range(3):
        arena.end_writes(tier, GROUP, [slot])
        assert is_ready(arena.generation(tier, GROUP, slot))
        arena.begin_writes(tier, GROUP, [slot])
        assert not is_ready(arena.generation(tier, GROUP, slot))
        arena.begin_writes(tier, GROUP, [slot])  # a slot may be opened again before anything was written
        seen.append(arena.generation(tier, GROUP, slot))
    assert seen == [seen[0] + 2 * n for n in range(4)]
    assert arena.generation(tier, GROUP, other) == first_generation(3)


def test_a_writer_cannot_lock_out_the_daemons_successor(segment: Memfd) -> None:
    said = run_client(
        """
        import fcntl
        for seal in (0x0010, fcntl.F_SEAL_WRITE):  # F_SEAL_FUTURE_WRITE has no name in Python 3.11
            try:
                fcntl.fcntl(fds[0], fcntl.F_ADD_SEALS, seal)
                print("done")
            except PermissionError:
                print("refused")
        """,
        segment.fd,
    )
    assert said.split() == ["refused"] * 2
    assert fcntl.fcntl(segment.fd, fcntl.F_GET_SEALS) == fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    with mmap.mmap(segment.fd, 0) as successor:
        successor[0] = 1
    assert segment.array[0] == 1


REOPEN_WRITABLE = """
os.setuid(65534)
for path in (f"/proc/self/fd/{fds[0]}", f"/proc/{os.getppid()}/fd/{fds[0]}"):
    try:
        os.pwrite(os.open(path, os.O_RDWR), b"x", 0)
        print("written")
    except PermissionError:
        print("refused")
"""


@as_root
def test_another_uid_cannot_reopen_a_reading_descriptor_for_writing(segment: Memfd) -> None:
    assert run_client(REOPEN_WRITABLE, segment.read_only_fd).split() == ["refused", "refused"]
    assert segment.array[0] == 0


@as_root
def test_an_unprotected_memfd_can_be_reopened_so() -> None:
    """The threat is real: without this, the test above could pass for a reason of its own."""
    fd = os.memfd_create("plain")
    os.ftruncate(fd, 4096)
    reading = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
    assert run_client(REOPEN_WRITABLE, reading).split()[0] == "written"
    os.close(reading)
    os.close(fd)


def test_descriptors_are_not_inherited(arena: Arena) -> None:
    listing = subprocess.run(["ls", "-l", "/proc/self/fd"], close_fds=False, capture_output=True, text=True, check=True)
    assert "kvtier:unit" not in listing.stdout
    assert "kvtier:unit:host" in os.readlink(f"/proc/self/fd/{arena.shared(write=False).fds['host']}")


def test_prefault_maps_every_page() -> None:
    size = (160 << 20) + (5 << 12)  # more than two pieces, and small pages besides huge ones
    segment = Memfd.create("kvtier:unit:prefault", size)
    segment.prefault()
    assert resident_bytes("kvtier:unit:prefault") == size
    segment.close()


def test_prefault_keeps_what_was_written_meanwhile(segment: Memfd) -> None:
    segment.array[:] = 77
    segment.prefault()
    assert (segment.array == 77).all()


def test_closing_tells_clients_and_leaves_views_alone() -> None:
    arena = make_arena("closing")
    fds = arena.shared(write=False).fds
    client = np.frombuffer(mmap.mmap(fds["control"], 0, prot=mmap.PROT_READ), np.uint8)
    arena.set_state(ArenaState.SERVING)
    view = arena.data(Tier.HOST)
    arena.close()
    assert client[STATE_OFFSET] == ArenaState.CLOSED
    view[:] = 5  # a copy thread that was late
    for fd in fds.values():
        with pytest.raises(OSError, match="Bad file"):
            os.fstat(fd)
    del view, client
    gc.collect()
    assert mapped_segments("closing") == 0


def test_an_arena_beyond_the_machines_memory_is_refused_before_a_page_is_taken() -> None:
    before = os.listdir("/proc/self/fd")
    with pytest.raises(TierConfigError, match="not enough memory") as refused:
        make_arena("huge", device=2**31 - 1)
    assert refused.value.field == "arena of huge"
    assert os.listdir("/proc/self/fd") == before
    assert mapped_segments("huge") == 0


def test_a_failed_allocation_is_an_error_that_leaves_nothing_behind() -> None:
    """The system refuses the second segment: here by a limit on file sizes, which memfds obey too."""
    said = run_client(
        """
        import resource
        from kvtierd.tiers.base import TierIOError
        from tests.unit.tiers.arena_helpers import make_arena, mapped_segments
        resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 10, 64 << 10))
        before = os.listdir("/proc/self/fd")
        try:
            make_arena("limited", host=20)
        except TierIOError as error:
            print(error)
        assert os.listdir("/proc/self/fd") == before
        assert mapped_segments("limited") == 0
        """
    )
    assert said.startswith("kvtier:limited:host: no shared memory: File too large")


def limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: Path, files: tuple[str, str, str], stat: str) -> Path:
    """A control group below another, which is limited: the file with that limit.

    ``files``: what the kernel says of the process, the name of a limit's file, and what says that there is none.
    """
    groups, limit, unlimited = files
    own.mkdir(parents=True)
    (tmp_path / "self").write_text(groups)
    for group, most in ((own, unlimited), (own.parent, str(10 << 20))):
        (group / limit).write_text(f"{most}\n")
        (group / "memory.stat").write_text(stat)
    monkeypatch.setattr(memfd, "_OWN_CGROUP", tmp_path / "self")
    monkeypatch.setattr(memfd, "_CGROUP_ROOT", tmp_path / "fs")
    return own.parent / limit


VERSIONS = [
    (
        "",
        ("1:cpu:/elsewhere\n0::/pod/container\n", "memory.max", "max"),
        f"anon {1 << 20}\nfile {8 << 20}\nshmem {2 << 20}\n",
    ),
    (
        "memory",
        ("4:cpu,memory:/pod/container\n0::/\n", "memory.limit_in_bytes", "9223372036854771712"),
        f"rss 0\nshmem 0\ntotal_cache {8 << 20}\ntotal_rss {1 << 20}\ntotal_shmem {2 << 20}\n",
    ),
]


@pytest.mark.parametrize(("tree", "files", "stat"), VERSIONS, ids=["version-2", "version-1"])
def test_a_control_group_above_limits_what_is_available(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tree: str, files: tuple[str, str, str], stat: str
) -> None:
    file = limited(tmp_path, monkeypatch, tmp_path / "fs" / tree / "pod" / "container", files, stat)
    assert memfd.available_bytes() == 7 << 20  # page cache gives way, anonymous and shared memory do not
    with pytest.raises(TierConfigError, match=str(7 << 20)):
        Memfd.create("kvtier:unit:group", 8 << 20)
    file.write_text(f"{files[-1]}\n")
    Memfd.create("kvtier:unit:group", 8 << 20).close()


def test_a_container_that_sees_its_part_of_the_tree_alone_is_limited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Version 1: the kernel tells the path on the host, and the container's own group is the root of its mount."""
    groups = ("4:memory:/docker/0123\n", "memory.limit_in_bytes", str(10 << 20))
    limited(tmp_path, monkeypatch, tmp_path / "fs" / "memory", groups, f"total_rss {1 << 20}\n")
    assert memfd.available_bytes() == 9 << 20
