"""A connector whose loads all fail."""

from __future__ import annotations

import hashlib
from dataclasses import replace

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

from kvtier.abi.keys import KEY_BYTES
from kvtier.connectors.vllm import KvtierConnector, Step
from kvtier.engine import Load


class EvictedConnector(KvtierConnector):
    """Its workers are asked for keys that nothing is stored under, as where an offer was evicted before the copy."""

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        assert isinstance(connector_metadata, Step)
        loads = tuple(_elsewhere(load) for load in connector_metadata.work.loads)
        work = replace(connector_metadata.work, loads=loads)
        super().bind_connector_metadata(replace(connector_metadata, work=work))


def _elsewhere(load: Load) -> Load:
    keys = {
        group: b"".join(hashlib.sha256(packed[at : at + KEY_BYTES]).digest() for at in range(0, len(packed), KEY_BYTES))
        for group, packed in load.keys.items()
    }
    return replace(load, keys=keys)
