"""The files under systemd/: as tight as promised, and as the daemon they start understands them."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from kvtierd.config import read

SYSTEMD = Path(__file__).resolve().parents[3] / "systemd"
EXPOSURE_LIMIT = 2.5

needs_systemd_analyze = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")


@pytest.fixture
def installed(tmp_path):
    """The unit by itself, with a program to start."""
    program = tmp_path / "kvtierd"
    program.touch(0o755)
    text = (SYSTEMD / "kvtierd.service").read_text()
    (tmp_path / "kvtierd.service").write_text(text.replace("/usr/bin/kvtierd", str(program)))
    return tmp_path / "kvtierd.service"


def with_gpu(unit):
    shutil.copytree(SYSTEMD / "kvtierd.service.d", unit.with_name("kvtierd.service.d"))
    return unit


def analyze(*arguments):
    """Reads files; starts nothing, and asks no running systemd."""
    command = ["systemd-analyze", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


@needs_systemd_analyze
@pytest.mark.parametrize("gpu", [False, True])
def test_the_unit_is_hardened_with_and_without_a_gpu(installed, gpu):
    ended = analyze("security", "--offline=yes", "--no-pager", with_gpu(installed) if gpu else installed)
    exposure = re.search(r"Overall exposure level for \S+: ([0-9.]+)", ended.stdout)
    assert exposure is not None, ended
    assert float(exposure[1]) <= EXPOSURE_LIMIT, ended.stdout


@needs_systemd_analyze
@pytest.mark.parametrize("gpu", [False, True])
def test_systemd_understands_every_line(installed, gpu):
    ended = analyze("verify", "--man=no", with_gpu(installed) if gpu else installed)
    said = [line for line in ended.stderr.splitlines() if "kvtierd" in line]
    assert not said, ended.stderr


def test_the_example_is_a_configuration():
    assert read(SYSTEMD / "kvtierd.toml", {}).config.host_bytes == 8 << 30


def test_everything_it_says_in_comments_would_be_one_too(tmp_path):
    text = (SYSTEMD / "kvtierd.toml").read_text()
    file = tmp_path / "kvtierd.toml"
    file.write_text(re.sub(r"^# (?=\w+ = |\[\[)", "", text, flags=re.MULTILINE))
    config = read(file, {}).config
    assert ([str(device) for device in config.device], len(config.allow)) == (["cuda=80%"], 1)


def test_the_unit_keeps_what_the_daemon_relies_on():
    unit = (SYSTEMD / "kvtierd.service").read_text().splitlines()
    for line in ("Type=notify", "RuntimeDirectoryMode=0750", "StateDirectoryMode=0700", "LimitMEMLOCK=infinity"):
        assert line in unit
    assert "RestartPreventExitStatus=2" in unit, "the exit status of a refused configuration"
    # SO_PEERCRED would name the overflow uid, and /proc/meminfo would be missing.
    assert not any(line.startswith(("PrivateUsers=", "ProcSubset=")) for line in unit)
