"""Connectors whose loads all fail, whose saves come late, whose saves come too early, and whose slots come late."""

from __future__ import annotations

import hashlib
import time
from dataclasses import replace
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata, KVConnectorMetadata

from kvtier.abi.keys import KEY_BYTES
from kvtier.connectors.vllm import KvtierConnector, Step
from kvtier.connectors.vllm_layout import pages_of
from kvtier.engine import Load

_SAVE_S = 60.0
_LATE_S = 0.2
_REFUSED = 28
"""Requests for slots: those of four groups in the first seven steps."""


class EvictedConnector(KvtierConnector):
    """Its workers are asked for keys that nothing is stored under, as where an offer was evicted before the copy."""

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        assert isinstance(connector_metadata, Step)
        loads = tuple(self._elsewhere(load) for load in connector_metadata.work.loads)
        work = replace(connector_metadata.work, loads=loads)
        super().bind_connector_metadata(replace(connector_metadata, work=work))

    def _elsewhere(self, load: Load) -> Load:
        return replace(load, keys={group: _others(packed) for group, packed in load.keys.items()})


class LateConnector(KvtierConnector):
    """Its workers' saves come late."""

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        super().register_kv_caches(kv_caches)
        assert self._mover is not None
        save = self._mover._save

        def late(*given: Any) -> None:
            time.sleep(_LATE_S)
            save(*given)

        vars(self._mover)["_save"] = late


class SlotlessConnector(KvtierConnector):
    """Its scheduler has no slots in the first steps."""

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        super().set_xfer_handshake_metadata_pp_aware(metadata)
        assert self._planner is not None
        leader, left = self._planner.leader, iter(range(_REFUSED))
        take = leader.take
        vars(leader)["take"] = lambda group, count: take(group, count if next(left, None) is None else 0)


class StatelessConnector(EvictedConnector):
    """Its workers miss the states alone."""

    def _elsewhere(self, load: Load) -> Load:
        return replace(load, keys=dict(load.keys) | {group: _others(load.keys[group]) for group in self._states})


def _others(packed: bytes) -> bytes:
    return b"".join(hashlib.sha256(packed[at : at + KEY_BYTES]).digest() for at in range(0, len(packed), KEY_BYTES))


class UnfinishedConnector(KvtierConnector):
    """A mutant: its workers save each state as it was before the step that finishes it."""

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        super().register_kv_caches(kv_caches)
        self._rows = pages_of(self._kv_cache_config, kv_caches)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._before = self._saved_pages()

    def wait_for_save(self) -> None:
        after = self._saved_pages()
        for page, content in self._before:
            page.copy_(content)
        super().wait_for_save()
        if self._mover is not None:
            self._mover.flush(patience=_SAVE_S)
        for page, content in after:
            page.copy_(content)

    def _saved_pages(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The pages of states that this step saves, each with a copy."""
        step = self._get_connector_metadata()
        assert isinstance(step, Step)
        found = [
            (rows, each.pages)
            for save in step.work.saves
            for group in self._states & save.places.keys()
            for each in save.places[group]
            for rows in self._rows[group].planes.values()
        ]
        return [(rows[page], rows[page].clone()) for rows, pages in found for page in pages]
