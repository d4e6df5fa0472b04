"""What this process has mapped, by the name of a file: as the kernel tells it."""

from pathlib import Path


def kilobytes(name: str, field: str) -> list[int]:
    """A field of ``smaps`` for each mapping whose file has ``name`` in its own."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    found = [next(line for line in lines if line.startswith(f"{field}:")) for line in lines if name in line]
    return [int(line.split()[1]) for line in found]


def resident_bytes(name: str) -> int:
    return sum(kilobytes(name, "Rss")) << 10
