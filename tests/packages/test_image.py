"""The container image, built by buildah on a Debian made here, since no registry is reachable, and run.

``--isolation chroot`` needs no container runtime: a command shares the host's pids and network, as with ``hostPID``.
"""

import json
import os
import shutil
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import debian
import pytest
import yaml

from tests.integration.waiting import PATIENCE_S
from tests.packages.source import ROOT, copied_to

TOOLS = {"mmdebstrap": "mmdebstrap", "buildah": "buildah"}
BASE = ("python3", "python3-venv", "ca-certificates")
BUILD_S = 1200.0
SMALL = ("--host-bytes=64MiB", "--disk-bytes=64MiB", "--metrics-listen=127.0.0.1:0")
CERTIFICATES = "/etc/ssl/certs"

pytestmark = [pytest.mark.long, pytest.mark.limit(2 * BUILD_S)]


class Buildah:
    """A store of images of its own."""

    def __init__(self, work: Path) -> None:
        self.command = ["buildah", "--root", str(work / "store"), "--runroot", str(work / "run")]
        self.environment = os.environ | {"STORAGE_DRIVER": "vfs", "BUILDAH_ISOLATION": "chroot"}

    def __call__(self, *arguments: str, cwd: Path | None = None, timeout: float = BUILD_S) -> str:
        ended = subprocess.run(
            [*self.command, *arguments],
            env=self.environment,
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout.strip()


@pytest.fixture(scope="module")
def image(tmp_path_factory):
    """Buildah and a container made from the image."""
    if why := debian.reason_to_skip(TOOLS):
        pytest.skip(why)
    work = tmp_path_factory.mktemp("image")
    buildah = Buildah(work)
    debian.make_root(work / "base.tar", *BASE)
    base = buildah("from", "scratch")
    buildah("add", "-q", base, str(work / "base.tar"), "/")
    buildah("commit", "-q", base, "base")
    tree = copied_to(work / "tree")
    flags = ["--build-arg", "BASE=localhost/base", "--volume", f"{CERTIFICATES}:{CERTIFICATES}:ro"]
    buildah("build", *flags, "-f", "deploy/Containerfile", "-t", "kvtier", ".", cwd=tree)
    yield buildah, buildah("from", "kvtier")
    shutil.rmtree(work)


@pytest.fixture
def mounts(short_dir):
    """The directories of the host, as the DaemonSet's init container makes them."""
    short_dir.chmod(0o755)
    found = []
    for name, place in (("run", "/run/kvtier"), ("state", "/var/lib/kvtier")):
        (short_dir / name).mkdir(mode=0o750)
        os.chown(short_dir / name, 6464, 6464)
        found += ["-v", f"{short_dir / name}:{place}"]
    return found


def configured(image):
    buildah, container = image
    return json.loads(buildah("inspect", container))["OCIv1"]["config"]


def test_it_runs_as_nobody_important_and_holds_no_build_tools(image):
    buildah, container = image
    assert configured(image)["User"] == "6464:6464"
    script = (
        "id -u; ls /src /opt/kvtier/bin/pip 2>/dev/null || echo clean; touch /opt/kvtier/x 2>/dev/null || echo shut"
    )
    assert buildah("run", container, "sh", "-c", script).split() == ["6464", "clean", "shut"]


def test_an_engine_s_pod_stores_blocks_in_a_daemon_s(image, mounts):
    """Each with the command, the user and the groups of its manifest; the daemon as the image starts it."""
    buildah, container = image
    pod = yaml.safe_load((ROOT / "deploy" / "kubernetes" / "engine.yaml").read_text())["spec"]
    command = [*configured(image)["Entrypoint"], "--config", "/etc/kvtier/kvtierd.toml", *SMALL]
    rules = f"{ROOT / 'deploy/kubernetes/kvtierd.toml'}:/etc/kvtier/kvtierd.toml:ro"
    with subprocess.Popen(
        [*buildah.command, "run", *mounts, "-v", rules, container, *command],
        env=buildah.environment,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as daemon:
        try:
            assert daemon.stdout is not None
            said = daemon.stdout.readline()
            assert said.startswith("kvtierd ready pid=")
            groups = ",".join(map(str, pod["securityContext"]["supplementalGroups"]))
            user = ["setpriv", "--reuid=1000", "--regid=1000", f"--groups={groups}"]
            engine = ["--user", "0:0", *mounts[:2], container, *user, *pod["containers"][0]["command"]]
            assert buildah("run", *engine, timeout=PATIENCE_S * 4) == "mapped=True found=1"
            os.kill(int(said.split("pid=")[1].split()[0]), signal.SIGTERM)
            assert daemon.wait(PATIENCE_S * 4) == 0
        finally:
            with suppress(ProcessLookupError):
                os.killpg(daemon.pid, signal.SIGKILL)
