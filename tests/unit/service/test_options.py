"""How a cache behaves: what is asked, what is stored, and what is refused."""

from typing import Any

import grpc
import pytest

from kvtier.v1 import caches_pb2
from kvtierd.service.cache import CacheSettings, require_same, wanted
from kvtierd.service.errors import CallRefused


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"write_policy": 77}, "options.write_policy"),
        ({"eviction": "random"}, "options.eviction"),
        ({"event_hash": "md5"}, "options.event_hash"),
        ({"checksum": "always"}, "options.checksum"),
    ],
)
def test_what_cannot_be_done_is_refused(values: dict[str, Any], field: str) -> None:
    with pytest.raises(CallRefused) as refused:
        wanted(caches_pb2.CacheOptions(**values))
    assert (refused.value.code, refused.value.detail.field) == (grpc.StatusCode.INVALID_ARGUMENT, field)


def test_other_options_than_the_cache_s_are_refused_by_name() -> None:
    with pytest.raises(CallRefused) as refused:
        require_same(CacheSettings(), {"eviction": "other"}, "cache")
    detail = refused.value.detail
    assert (detail.reason, detail.field, detail.value) == ("OPTIONS_MISMATCH", "options.eviction", "other")


@pytest.mark.parametrize(
    ("values", "named"), [({"colour": 1}, "colour"), ({"eviction": "random"}, "random"), ({"write_policy": "up"}, "up")]
)
def test_stored_options_of_a_later_daemon_are_refused(values: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        CacheSettings.from_stored(values)
