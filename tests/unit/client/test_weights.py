"""The digest of a model's weights: a copy has it, whatever else differs has another."""

import json
import logging
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvtier import InvalidArgument
from kvtier.engine import Adapters, EngineOptions, Weights, weights_of

COMMIT = "3" * 40
LARGE = 12 << 20
log = logging.getLogger("test")


def safetensors(path: Path, seed: int = 1, *, norm: int = 1) -> None:
    """A large tensor and a small one behind it, which no sample at regular distances meets."""
    large, small = np.random.default_rng(seed).bytes(LARGE), np.random.default_rng(norm).bytes(512)
    places = {"layer.weight": (0, LARGE), "norm.weight": (LARGE, LARGE + 512), "tail": (LARGE + 512, LARGE + 8192)}
    tensors = {name: {"dtype": "U8", "shape": [b - a], "data_offsets": [a, b]} for name, (a, b) in places.items()}
    header = json.dumps({"__metadata__": {"format": "pt"}, **tensors}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + large + small + bytes(8192 - 512))


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text('{"hidden_size": 64}')
    safetensors(path / "model.safetensors")
    return path


CHANGES: dict[str, Callable[[Path], object]] = {
    "trained": lambda path: safetensors(path / "model.safetensors", seed=2),
    "one small tensor": lambda path: safetensors(path / "model.safetensors", norm=2),
    "one file more": lambda path: safetensors(path / "more.safetensors"),
    "longer": lambda path: os.truncate(path / "model.safetensors", LARGE + (1 << 20)),
    "settings": lambda path: (path / "config.json").write_text('{"hidden_size": 65}'),
    "quantised": lambda path: (path / "hf_quant_config.json").write_text('{"quant_algo": "FP8"}'),
    "code": lambda path: (path / "modeling.py").write_text("scale = 2"),
    "renamed": lambda path: (path / "model.safetensors").rename(path / "other.safetensors"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_other_weights_have_another_digest(model, change):
    before = weights_of(str(model))
    CHANGES[change](model)
    after = weights_of(str(model))
    assert before.source is not None and after.source is not None
    assert before.digest != after.digest


def test_a_copy_has_the_digest_of_the_original(model, tmp_path):
    copy = tmp_path / "elsewhere" / "model"
    shutil.copytree(model, copy, copy_function=shutil.copyfile)
    os.utime(copy / "model.safetensors", (1, 1))
    link = tmp_path / "latest"
    link.symlink_to(copy)
    original = weights_of(str(model))
    for path in (copy, link):
        found = weights_of(str(path))
        assert (found.name, found.digest) == (original.name, original.digest)


OUTSIDE = b'{"a": {"data_offsets": [-99999999999999999999, 99999999999999999999]}}'


@pytest.mark.parametrize(
    "written", [b"", b"\xff" * 7, b"\xff" * 64, b"\0" * 8, *(struct.pack("<Q", len(h)) + h for h in (b"[]", OUTSIDE))]
)
def test_a_file_that_is_not_as_its_name_says_is_sampled_all_the_same(tmp_path, written):
    digests = set()
    for last in (b"a", b"b"):
        (tmp_path / "model.safetensors").write_bytes(written + last)
        digests.add(weights_of(str(tmp_path)).digest)
    assert len(digests) == 2


def test_the_line_of_the_log_says_from_what(model, caplog):
    with caplog.at_level(logging.INFO):
        weights_of(str(model)).log(log)
        weights_of("org/nowhere").log(log)
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING"]
    assert "samples of 1 files" in caplog.messages[0]
    assert "weights_version" in caplog.messages[1]


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """This host's cache of the hub, in which the branch of a model moves on."""
    pytest.importorskip("huggingface_hub")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    home = tmp_path / "models--org--m"
    (home / "refs").mkdir(parents=True)

    def move(commit: str) -> None:
        (home / "snapshots" / commit).mkdir(parents=True)
        (home / "snapshots" / commit / "config.json").write_text("{}")
        (home / "refs/main").write_text(commit)

    return move


def test_a_branch_of_the_hub_is_known_by_its_commit(hub):
    found: list[Weights] = []
    for commit in ("1" * 40, "2" * 40):
        hub(commit)
        found.append(weights_of("org/m"))
        assert found[-1].source == f"commit {commit}"
    assert found[0].digest != found[1].digest
    assert weights_of("org/m", "1" * 40).digest == found[0].digest


def test_the_commit_that_the_engine_names_is_believed_before_the_cache(hub):
    hub("1" * 40)
    assert weights_of("org/m", commit=COMMIT).source == f"commit {COMMIT}"


def test_the_users_own_name_is_believed(model):
    digests = {weights_of(str(model), version=version).digest for version in (None, "1", "2")}
    assert len(digests) == 3
    before = weights_of(str(model), version="1")
    CHANGES["trained"](model)
    assert weights_of(str(model), version="1") == before
    with pytest.raises(InvalidArgument, match="weights_version"):
        EngineOptions.of({"weights_version": 1})


def test_a_directory_without_weights_is_known_by_its_path(tmp_path):
    found = set()
    for run in ("one", "two"):
        path = tmp_path / run / "final"
        path.mkdir(parents=True)
        (path / "config.json").write_text("{}")
        found.add(weights_of(str(path)).digest)
    assert len(found) == 2


def test_unreadable_weights_are_missing_weights(tmp_path):
    (tmp_path / "model.safetensors").symlink_to("/proc/self/mem")  # reads fail
    assert weights_of(str(tmp_path)).source is None


@pytest.fixture
def adapter(tmp_path):
    path = tmp_path / "adapter"
    path.mkdir()
    safetensors(path / "adapter_model.safetensors")
    return path


def test_an_adapter_has_the_digest_of_its_files_in_each_engine(adapter):
    adapters = Adapters(log)
    first = adapters.digest(str(adapter))
    assert first is not None and adapters.digest(str(adapter)) == first == Adapters(log).digest(str(adapter))
    safetensors(adapter / "adapter_model.safetensors", seed=2)
    assert Adapters(log).digest(str(adapter)) not in (None, first)


def test_an_adapter_whose_files_change_under_the_engine_is_refused(adapter, caplog):
    """Loaded in place, or under another number: the engine's own cache has pages of before."""
    adapters = Adapters(log)
    assert adapters.digest(str(adapter)) is not None
    for seed in (2, 2, 3):
        safetensors(adapter / "adapter_model.safetensors", seed)
        assert adapters.digest(str(adapter)) is None
    assert str(adapter) in caplog.text


def test_an_adapter_without_files_is_refused(tmp_path):
    assert Adapters(log).digest(str(tmp_path / "gone")) is None
    assert Adapters(log).digest(str(tmp_path)) is None
