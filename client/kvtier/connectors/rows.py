"""The bytes of pages in torch tensors of any memory order, as contiguous rows of uint8."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch


def page_rows(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns views of the same memory: uint8 ``[pages, nbytes]``, by name. ``tensors``: ``[pages, ...]``, any strides.
    A tensor whose pages are not dense becomes several, split along its first axes: ``name.0``, ``name.1``, ..."""
    return dict(row for name, pages in tensors.items() for row in _rows(name, pages))


def joined(rows: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Joins rows that lie one after another in memory, with the block outermost. Returns None for other rows."""
    first, *others = sorted(rows, key=lambda row: row.data_ptr())
    end = first.data_ptr() + first.shape[1]
    for row in others:
        if row.data_ptr() != end or row.stride(0) != first.stride(0):
            return None
        end += row.shape[1]
    nbytes = end - first.data_ptr()
    return _bytes(first, nbytes, first.stride(0), int(first.storage_offset())) if nbytes <= first.stride(0) else None


def _rows(name: str, pages: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    dense = 1
    for size, stride in sorted(zip(pages.shape[1:], pages.stride()[1:], strict=True), key=lambda axis: axis[1]):
        if size > 1 and stride != dense:
            for at in range(pages.shape[1]):
                yield from _rows(f"{name}.{at}", pages[:, at])
            return
        dense *= size
    size = pages.element_size()
    yield name, _bytes(pages, dense * size, pages.stride(0) * size, int(pages.storage_offset()) * size)


def _bytes(of: torch.Tensor, nbytes: int, stride: int, offset: int) -> torch.Tensor:
    raw = torch.empty(0, dtype=torch.uint8, device=of.device).set_(of.untyped_storage())
    return raw.as_strided((of.shape[0], nbytes), (stride, 1), offset)
