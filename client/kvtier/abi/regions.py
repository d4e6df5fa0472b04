"""Placing pieces in a segment, and checking where somebody else placed them."""

from __future__ import annotations

from dataclasses import dataclass

from kvtier.abi.errors import AbiError


class Cursor:
    """Hands out aligned pieces of a segment, from the start."""

    def __init__(self, end: int) -> None:
        self.end = end

    def take(self, size: int, alignment: int) -> int:
        if not size:
            return 0
        start = -(-self.end // alignment) * alignment
        self.end = start + size
        return start


@dataclass(slots=True, frozen=True)
class Region:
    """Bytes [start, start + size) of a segment, named by the field that places them."""

    field: str
    start: int
    size: int
    alignment: int


def check_apart(regions: list[Region], size: int) -> None:
    """Regions are aligned, inside their segment and apart."""
    end, before = 0, ""
    for region in sorted(regions, key=lambda region: region.start):
        if not region.size:
            if region.start:
                raise AbiError(region.field, region.start, "0, for it is empty")
            continue
        check_place(region.field, region.start, region.size, region.alignment, size)
        if region.start < end:
            raise AbiError(region.field, region.start, f"at or above {end}, the end of {before}")
        end, before = region.start + region.size, region.field


def check_place(field: str, start: int, size: int, alignment: int, segment_size: int) -> None:
    if start % alignment:
        raise AbiError(field, start, f"a multiple of {alignment}")
    if start + size > segment_size:
        raise AbiError(field, start, f"so low that its {size} bytes end inside the segment's {segment_size}")
