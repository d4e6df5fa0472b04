"""The planes of an engine's pages, and the cache whose blocks are these pages."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from numpy.typing import NDArray

from kvtier.abi.spec import STATE, CacheSpec, PoolSpec, WindowGroupSpec
from kvtier.errors import InvalidArgument
from kvtier.memory.planes import Planes

if TYPE_CHECKING:
    import torch

Array: TypeAlias = "NDArray[Any] | torch.Tensor"

_NO_NAME: Final = re.compile(r"[^A-Za-z0-9._-]+")
_SHOWN_OF_FINGERPRINT: Final = 16
_MAX_PREFIX: Final = 100


@dataclass(slots=True, frozen=True)
class PlaneLayout:
    """The bytes of a page in one tensor of one rank. ``replicated``: every rank has the same bytes (MLA)."""

    name: str
    nbytes: int
    replicated: bool = False
    dtype: str = ""


@dataclass(slots=True, frozen=True)
class PageGroup:
    """Layers whose pages come and go together. ``window``: tokens of a sliding window, 0 = full attention; ``sink``:
    number of first tokens that stay in the window."""

    planes: tuple[PlaneLayout, ...]
    window: int = 0
    sink: int = 0

    def nbytes(self, *, replicated: bool) -> int:
        """Returns the bytes of a page on one rank, of its replicated or of its other planes."""
        return sum(plane.nbytes for plane in self.planes if plane.replicated is replicated)


@dataclass(frozen=True)
class Layout:
    """The properties that two engines must have in common to share pages of ``tokens`` tokens.

    A cache has the planes of all ranks: one pool for the replicated planes, then one pool per ``replicas`` ranks:
    that number of consecutive ranks has the same bytes in the other planes. All ranks commit a block at once.
    ``stages``: the ranks are divided, in order, into this number of pipeline stages. Each stage has the planes of its
    layers, and the cache is the same for any number of stages.
    ``identity``: all other properties that decide the meaning of the bytes: weights, attention backend, engine.
    ``weights``: for the log, the source of the weights' digest.
    """

    model: str
    tokens: int
    groups: tuple[PageGroup, ...]
    ranks: int = 1
    identity: Mapping[str, str] = field(default_factory=dict, hash=False)
    weights: str = field(default="", compare=False)
    replicas: int = 1
    stages: int = 1

    @staticmethod
    def of_stages(stages: Sequence[Layout]) -> Layout:
        """Returns the layout of an engine whose pipeline stages have these layouts."""
        groups = tuple(
            replace(parts[0], planes=tuple(plane for part in parts for plane in part.planes))
            for parts in zip(*(stage.groups for stage in stages), strict=True)
        )
        identity: dict[str, str] = {}
        for name, value in sorted({item for stage in stages for item in stage.identity.items()}):
            identity[name] = f"{identity[name]} {value}" if name in identity else value
        ranks, replicas = sum(stage.ranks for stage in stages), math.gcd(*(stage.replicas for stage in stages))
        return replace(stages[0], groups=groups, ranks=ranks, identity=identity, replicas=replicas, stages=len(stages))

    @property
    def ranks_per_stage(self) -> int:
        return self.ranks // self.stages

    @cached_property
    def spec(self) -> CacheSpec:
        """The specification of the cache. Raises :class:`InvalidArgument` for a layout that no cache can have."""
        groups = tuple(
            WindowGroupSpec(group.window, self._pools(group), sink_tokens=group.sink) for group in self.groups
        )
        identity = {**self.identity, "planes": hashlib.sha256(repr(self.groups).encode()).hexdigest()}
        spec = CacheSpec(self.model, "uint8", self.tokens, groups=groups, identity=identity)
        try:
            spec.validate()
        except InvalidArgument as error:
            raise InvalidArgument(f"layout: {error.field}", error.value, error.limit) from error
        return spec

    @cached_property
    def states(self) -> tuple[int, ...]:
        """The groups whose layers keep a state."""
        return tuple(number for number, group in enumerate(self.groups) if group.window == STATE)

    def cache(self, prefix: str | None = None) -> str:
        """Returns the name of the cache. Engines with different layouts get different names."""
        return cache_name(self.spec, prefix)

    def _pools(self, group: PageGroup) -> tuple[PoolSpec, ...]:
        same, own = group.nbytes(replicated=True), group.nbytes(replicated=False)
        return (
            *[PoolSpec.opaque(same)] * (same > 0),
            *[PoolSpec.opaque(own)] * (self.ranks_per_stage // self.replicas if own else 0),
        )


def cache_name(spec: CacheSpec, prefix: str | None) -> str:
    shown = _NO_NAME.sub("-", prefix or spec.model).strip("-._")[:_MAX_PREFIX]
    return f"{shown or 'cache'}-{spec.fingerprint().hex()[:_SHOWN_OF_FINGERPRINT]}"


class GroupPages:
    """A worker's own memory for one group: an array per plane, whose first axis is the page."""

    def __init__(self, group: int, planes: Mapping[str, Array], whole: Array | None = None) -> None:
        """``planes``: arrays ``[pages, ...]`` of any dtype, on the CPU or a GPU; each page is contiguous.

        ``whole``: the same memory as one array, if each page is contiguous over all planes.
        """
        self.group: Final = group
        self.planes: Final = dict(planes)
        self.whole: Final = whole

    def of(self, layout: Layout, rank: int) -> tuple[Planes | None, Planes | None]:
        """Returns the planes that a rank loads, and the planes that it saves. The first rank with the same bytes saves.
        A stage may have no layers of the group.

        Raises :class:`InvalidArgument` if the arrays do not fit the layout.
        """
        group, rank = layout.groups[self.group], rank % layout.ranks_per_stage
        here = [plane for plane in group.planes if layout.stages == 1 or plane.name in self.planes]
        expected = {plane.name: plane.nbytes for plane in here}
        found = {name: int(array[0].nbytes) for name, array in self.planes.items()}
        if found != expected:
            wrong = sorted(name for name in expected | found if expected.get(name) != found.get(name))
            shown = ", ".join(f"{name}: {found.get(name, 'none')}" for name in wrong[:3])
            raise InvalidArgument(f"pages of group {self.group}", shown, f"bytes a page as in the layout: {expected}")
        same, (shard, copy) = group.nbytes(replicated=True), divmod(rank, layout.replicas)
        start = {True: 0, False: same + shard * group.nbytes(replicated=False)}
        parts = []
        for plane in group.planes:
            if plane.name in self.planes:
                parts.append((start[plane.replicated], self.planes[plane.name], plane.replicated))
            start[plane.replicated] += plane.nbytes
        if self.whole is not None:
            parts = [(parts[0][0], self.whole, parts[0][2])]
        nbytes = layout.spec.block_bytes(self.group)
        loads = [(offset, array) for offset, array, _ in parts]
        own = [(offset, array) for offset, array, shared in parts if (rank if shared else copy) == 0]
        return Planes(loads, nbytes) if loads else None, Planes(own, nbytes) if own else None
