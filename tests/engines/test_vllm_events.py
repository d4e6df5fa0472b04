"""The bridge's events against the event classes of each vLLM in the engines' environment."""

import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvtier.bridge import Encoding
from kvtier.bridge.vllm import AllBlocksCleared, BlockRemoved, BlockStored, VllmEvent, batch_of
from tests import vllm_reader
from tests.engines.conftest import VLLMS, folders, require
from tests.engines.engines import ROOT, environment

pytestmark = [pytest.mark.engines, pytest.mark.limit(200)]

SGLANGS = {"cache_salt"}
"""Fields that vLLM's readers pass over."""
EVENTS: list[VllmEvent] = [
    AllBlocksCleared(),
    BlockStored([2, 3], 1, [5, 6, 7, 8], 2, 9, "CPU", "adapter", [["adapter"], None], 1, "sliding_window", 64),
    BlockStored([1], None, [], 2, None, "GPU", None),
    BlockRemoved([2, 3], "DISK", 1),
]
READ = """
import json, sys, msgspec, vllm
from vllm.distributed import kv_events
decode = msgspec.msgpack.Decoder(kv_events.KVEventBatch).decode
batches = [decode(bytes.fromhex(line)) for line in sys.stdin]
names = ("KVEventBatch", "BlockStored", "BlockRemoved", "AllBlocksCleared")
fields = {name: getattr(kv_events, name).__struct_fields__ for name in names}
events = [[type(event).__name__, msgspec.structs.asdict(event)] for batch in batches for event in batch.events]
ranks = [batch.data_parallel_rank for batch in batches]
print(json.dumps({"version": vllm.__version__, "fields": fields, "events": events, "ranks": ranks}))
"""


def read_events(engines: Path, vllm: str, payloads: Iterable[bytes]) -> Any:
    """Reads batches with the classes of a version of vLLM."""
    command, told = [str(require(engines, vllm)), "-c", READ], "\n".join(map(bytes.hex, payloads))
    variables = environment(*folders(engines, vllm))
    done = subprocess.run(command, input=told, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["version"].startswith(VLLMS[vllm])
    return found


@pytest.fixture(scope="module", params=VLLMS)
def read(engines, request):
    return read_events(engines, request.param, [msgspec.msgpack.encode(batch_of(EVENTS, Encoding.MAP, 1.5, 3))])


def test_vllm_reads_what_the_bridge_publishes(read):
    assert read["ranks"] == [3]
    assert [kind for kind, _ in read["events"]] == [type(event).__name__ for event in EVENTS]
    for (_, found), event in zip(read["events"], EVENTS, strict=True):
        told = msgspec.to_builtins(msgspec.structs.asdict(event))
        assert {name: found[name] for name in told.keys() - SGLANGS} == {
            name: value for name, value in told.items() if name not in SGLANGS
        }


@pytest.mark.limit(900)
def test_after_a_hundred_kills_a_router_knows_what_the_daemon_lists(engines):
    """Of engine and daemon, in turn by chance: vLLM's own events, in the index of Dynamo's routers."""
    home, python = Path(tempfile.mkdtemp(prefix="kv-")), require(engines, "dynamo")
    script = str(ROOT / "tests/engines/router_kills.py")
    command = [str(python), script, str(home), "100"]
    done = subprocess.run(command, env=environment(engines / "dynamo"), capture_output=True, text=True, check=False)
    shutil.rmtree(home)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["blocks"] > 0 and found["removed"] > 0


@pytest.mark.parametrize("kind", [BlockStored, BlockRemoved, AllBlocksCleared])
def test_no_field_is_unknown_there(read, kind):
    assert set(kind.__struct_fields__) - set(read["fields"][kind.__name__]) <= SGLANGS


@pytest.mark.parametrize("kind", ["BlockStored", "BlockRemoved", "AllBlocksCleared"])
def test_the_tests_router_reads_as_vllm_does(read, kind):
    """Later releases only add fields at the end."""
    ours = getattr(vllm_reader, kind).__struct_fields__
    assert tuple(read["fields"][kind][: len(ours)]) == ours
    assert tuple(read["fields"]["KVEventBatch"]) == vllm_reader.MapBatch.__struct_fields__
