"""Translation between the core's values and ``kvtier.v1`` messages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, TypeVar

from google.protobuf.message import Message

from kvtier.abi.keys import ROOT_PARENT
from kvtier.v1 import blocks_pb2, common_pb2
from kvtierd.core.ids import Key, LeaseId, Tier

M = TypeVar("M", bound=Message)

TIER_TO_WIRE: Final[Mapping[Tier, common_pb2.Tier.ValueType]] = {
    Tier.DEVICE: common_pb2.TIER_DEVICE,
    Tier.HOST: common_pb2.TIER_HOST,
    Tier.DISK: common_pb2.TIER_DISK,
    Tier.REMOTE: common_pb2.TIER_REMOTE,
}
TIER_FROM_WIRE: Final[Mapping[int, Tier]] = {value: tier for tier, value in TIER_TO_WIRE.items()}


def same_fields(kind: type[M], source: object, **others: Any) -> M:
    """A message with the source's attributes of the same names. ``others``: the fields that the source lacks."""
    names = (name for name in kind.DESCRIPTOR.fields_by_name if name not in others)
    return kind(**others, **{name: getattr(source, name) for name in names})


def granted_leases(reply: Message | None) -> list[LeaseId]:
    if isinstance(reply, blocks_pb2.ReserveResponse | blocks_pb2.JoinResponse):
        return [LeaseId(reply.lease_id)]
    if isinstance(reply, blocks_pb2.AcquireResponse):
        leases = [part.lease_id for chain in reply.chains for part in chain.groups]
        return [LeaseId(lease) for lease in leases if lease]
    return []


def parents(values: Iterable[Key | None]) -> bytes:
    return b"".join([ROOT_PARENT if value is None else value for value in values])
