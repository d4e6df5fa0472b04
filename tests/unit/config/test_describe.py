"""What kvtierd says of its configuration is what it accepts."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from kvtierd.config.describe import bounds, reference
from kvtierd.config.keys import KEYS, Config
from kvtierd.config.load import load
from kvtierd.main import main
from tests.tls import Authority

ROOT = Path(__file__).resolve().parents[3]
FLAGS = ["--host-bytes", "8GiB", "--wait-seconds", "1min30s", "--allow-uids", "7", "--allow-uids", "9"]


class Ended(NamedTuple):
    status: int | str | None
    out: str
    err: str


Run = Callable[..., Ended]


@pytest.fixture
def kvtierd(capsys: pytest.CaptureFixture[str]) -> Run:
    """The command, in this process: none of these starts a daemon."""

    def run(*arguments: str) -> Ended:
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        return Ended(ended.value.code, *capsys.readouterr())

    return run


def test_the_reference_is_current() -> None:
    written = (ROOT / "docs" / "configuration.md").read_text()
    assert written == reference(), "run: kvtierd --config-reference > docs/configuration.md"


def test_every_key_is_explained_and_every_number_has_its_range() -> None:
    assert set(KEYS) == set(Config.model_fields), "a key stands in a section"
    for name, field in KEYS.items():
        assert field.description and field.description.endswith("."), name
        if field.annotation in (int, float):
            assert bounds(field), name


def test_the_effective_configuration_is_a_file_that_says_the_same(tmp_path: Path, kvtierd: Run) -> None:
    ended = kvtierd("--print-config", *FLAGS)
    assert ended.status == 0, ended.err
    again = tmp_path / "kvtierd.toml"
    again.write_text(ended.out)
    expected = {"host_bytes": "8GiB", "wait_seconds": 90, "allow_uids": [7, 9]}
    assert load(again, {}) == load(None, expected)
    assert tomllib.loads(ended.out)["wait_seconds"] == "90s"


def test_a_share_is_printed_as_it_was_given(tmp_path: Path, kvtierd: Run) -> None:
    ended = kvtierd("--print-config", "--device", "cuda", "--device-bytes", "80%")
    assert tomllib.loads(ended.out)["device_bytes"] == "80%"
    again = tmp_path / "kvtierd.toml"
    again.write_text(ended.out)
    assert load(again, {}) == load(None, {"device": "cuda", "device_bytes": "80%"})
    ended = kvtierd("--print-config", "--json", "--device", "cuda", "--device-bytes", "80%")
    assert json.loads(ended.out)["device_bytes"]["value"] == "80%"


def test_every_value_names_its_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kvtierd: Run) -> None:
    file = tmp_path / "kvtierd.toml"
    file.write_text("\n# how long\nwait_seconds = 5\nmax_sessions = 7\n")
    monkeypatch.setenv("KVTIERD_MAX_SESSIONS", "8")
    ended = kvtierd("--config", str(file), "--print-config", "--json", *FLAGS[:2])
    values = json.loads(ended.out)
    assert values["wait_seconds"] == {"value": 5.0, "source": f"{file}:3: wait_seconds"}
    assert values["max_sessions"] == {"value": 8, "source": "environment: KVTIERD_MAX_SESSIONS"}
    assert values["host_bytes"] == {"value": 8 << 30, "source": "command line: --host-bytes"}
    assert values["log_level"] == {"value": "info", "source": "default"}


def test_a_check_says_what_a_start_would_and_touches_nothing(short_dir: Path, kvtierd: Run) -> None:
    directories = ["--runtime-dir", f"{short_dir}/run", "--state-dir", f"{short_dir}/state"]
    right = kvtierd("--check-config", *directories, *FLAGS)
    assert (right.status, right.out) == (0, "kvtierd: the configuration is right\n")
    wrong = kvtierd("--check-config", *directories, "--max-sessions", "0")
    assert wrong.status == 2
    assert "command line: --max-sessions = '0': must be 1 to 65536" in wrong.err
    assert not list(short_dir.iterdir())


def test_a_check_looks_at_the_files_of_tls(tmp_path: Path, kvtierd: Run) -> None:
    served = Authority(tmp_path).issue("127.0.0.1")
    named = {"tls_cert": served.cert, "tls_key": served.key, "tls_client_ca": served.ca}
    file = tmp_path / "kvtierd.toml"

    def check(**others: Path) -> Ended:
        keys = "".join(f'{key} = "{path}"\n' for key, path in {**named, **others}.items())
        file.write_text(f'host_bytes = "1GiB"\nlisten_tcp = "0.0.0.0:7000"\n{keys}')
        return kvtierd("--config", str(file), "--check-config")

    assert check().status == 0
    empty, missing = tmp_path / "empty", tmp_path / "missing"
    empty.touch()
    wrong = check(tls_key=missing, tls_client_ca=empty)
    assert wrong.status == 2
    key, authority = wrong.err.splitlines()
    assert key == f"kvtierd: {file}:4: tls_key = {missing}: cannot be read: No such file or directory"
    assert authority.startswith(f"kvtierd: {file}:5: tls_client_ca = {empty}: holds no certificate")
    assert f"{file}:3: tls_cert = {empty}: is no certificate that fits tls_key" in check(tls_cert=empty).err


def test_json_is_for_printing(kvtierd: Run) -> None:
    ended = kvtierd("--json", *FLAGS)
    assert ended.status == 2
    assert "--json goes with --print-config" in ended.err
