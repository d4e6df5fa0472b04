"""What wheel and sdist carry, and the service that `kvtier install-service` makes of it."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.packages.source import ROOT, copied_to

SHARED = {
    *("systemd/kvtierd.service", "systemd/kvtierd.service.d/gpu.conf", "systemd/kvtierd.toml"),
    *("systemd/sysusers.d/kvtier.conf", "systemd/tmpfiles.d/kvtier.conf"),
    *("monitoring/alerts.yml", "monitoring/grafana-dashboard.json"),
    *(f"proto/kvtier/v1/{path.name}" for path in (ROOT / "proto/kvtier/v1").glob("*.proto")),
}

needs_systemd = pytest.mark.skipif(
    os.getuid() != 0 or shutil.which("systemd-sysusers") is None, reason="needs root and systemd's commands"
)


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    """The files of wheel and sdist, built from a copy of the tree."""
    tree = copied_to(tmp_path_factory.mktemp("wheel") / "tree")
    build = "from setuptools.build_meta import *; build_wheel('dist'); build_sdist('dist')"
    subprocess.run([sys.executable, "-c", build], cwd=tree, check=True, capture_output=True, timeout=120)
    (wheel,), (sdist,) = (tree / "dist").glob("*.whl"), (tree / "dist").glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as inside, tarfile.open(sdist) as source:
        return set(inside.namelist()), set(source.getnames())


def test_the_wheel_holds_what_a_service_needs(packages):
    data = "kvtier-0.1.0.data/data/share/"
    held = {name.removeprefix(data) for name in packages[0] if name.startswith(data)}
    assert {name.removeprefix("kvtier/") for name in held if name.startswith("kvtier/")} == SHARED
    assert {"doc/kvtier/operations.md", "doc/kvtier/configuration.md"} <= held


def test_the_sdist_holds_the_sources_of_it(packages):
    names = {name.partition("/")[2] for name in packages[1]}
    assert {path for path in SHARED if not path.startswith("monitoring")} <= names
    assert {"deploy/alerts.yml", "docs/grafana-dashboard.json", "client/kvtier/cli/service.py"} <= names


def install(root, *flags):
    command = [sys.executable, "-m", "kvtier.cli", "install-service", f"--root={root}", *flags]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert ended.returncode == 0, ended.stderr
    return [line.split(maxsplit=1) for line in ended.stdout.splitlines()]


def files(root):
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


@needs_systemd
def test_a_dry_run_says_all_and_changes_nothing(tmp_path):
    said = install(tmp_path)
    assert [word for word, _ in said] == ["install"] * 4 + ["run"] * 2 + ["This"]
    assert files(tmp_path) == set()


@needs_systemd
def test_an_installation_makes_the_unit_the_user_and_the_directories(tmp_path):
    install(tmp_path, "--yes")
    unit = (tmp_path / "etc/systemd/system/kvtierd.service").read_text()
    assert f"ExecStart={Path(sys.executable).with_name('kvtierd')} --config /etc/kvtier/kvtierd.toml" in unit
    assert "kvtier:x:" in (tmp_path / "etc/passwd").read_text()
    configuration = tmp_path / "etc/kvtier/kvtierd.toml"
    assert configuration.stat().st_mode & 0o777 == 0o640
    assert configuration.parent.stat().st_mode & 0o777 == 0o750
    assert not any("gpu" in name for name in files(tmp_path))


@needs_systemd
def test_an_upgrade_keeps_the_configuration_and_replaces_the_unit(tmp_path):
    install(tmp_path, "--yes")
    unit, configuration = tmp_path / "etc/systemd/system/kvtierd.service", tmp_path / "etc/kvtier/kvtierd.toml"
    unit.write_text("of an older version")
    configuration.write_text("mine")
    done = {Path(rest).name: word for word, rest in install(tmp_path, "--yes", "--gpu") if word != "run"}
    assert done["kvtierd.service"] == "replace"
    assert done["kvtierd.toml"] == "kept"
    assert done["gpu.conf"] == "install"
    assert configuration.read_text() == "mine"
    assert unit.read_text().startswith("[Unit]")
