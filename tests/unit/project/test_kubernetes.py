"""The manifests in deploy/kubernetes: as the published schemas want them, and at one with each other."""

import re
from importlib.metadata import version
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from kvtierd.config import read

MANIFESTS = Path(__file__).resolve().parents[3] / "deploy" / "kubernetes"
OLDEST = "1.29"


def documents(name):
    return list(yaml.safe_load_all((MANIFESTS / name).read_text()))


@pytest.fixture
def pod():
    (daemonset,) = documents("daemonset.yaml")
    return daemonset["spec"]["template"]["spec"]


@pytest.mark.parametrize("name", ["namespace.yaml", "daemonset.yaml", "engine.yaml"])
@pytest.mark.parametrize("version", [OLDEST, kubernetes_validate.latest_version()])
def test_the_schemas_know_every_field(name, version):
    for document in documents(name):
        kubernetes_validate.validate(document, version, strict=True)


def test_a_field_that_is_misspelt_is_found():
    (daemonset,) = documents("daemonset.yaml")
    daemonset["spec"]["template"]["spec"]["hostPid"] = True
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(daemonset, OLDEST, strict=True)


def test_kustomize_finds_its_files_and_makes_the_map_that_the_pod_mounts(pod):
    (kustomization,) = documents("kustomization.yaml")
    (generator,) = kustomization["configMapGenerator"]
    assert all((MANIFESTS / name).is_file() for name in (*kustomization["resources"], *generator["files"]))
    assert {"name": "config", "configMap": {"name": generator["name"]}} in pod["volumes"]
    (container,) = pod["containers"]
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert container["args"] == ["--config", f"{mounts['config']}/{generator['files'][0]}"]
    config = read(MANIFESTS / "kvtierd.toml", {}).config
    assert (str(config.runtime_dir), str(config.state_dir)) == (mounts["run"], mounts["state"])


def test_images_are_named_by_version_and_the_base_by_digest(pod):
    (engine,) = documents("engine.yaml")
    used = [each["image"] for each in (*pod["initContainers"], *pod["containers"], *engine["spec"]["containers"])]
    assert set(used) == {f"kvtier:{version('kvtier')}"}
    containerfile = (MANIFESTS.parent / "Containerfile").read_text()
    assert re.search(r"^ARG BASE=\S+:\S+@sha256:[0-9a-f]{64}$", containerfile, re.MULTILINE)


def test_probes_and_rules_meet_the_configuration(pod):
    config = read(MANIFESTS / "kvtierd.toml", {}).config
    (container,) = pod["containers"]
    (port,) = container["ports"]
    assert config.metrics_listen == f"0.0.0.0:{port['containerPort']}"
    paths = {kind: container[kind]["httpGet"]["path"] for kind in ("startupProbe", "livenessProbe", "readinessProbe")}
    assert paths == {"startupProbe": "/healthz", "livenessProbe": "/healthz", "readinessProbe": "/readyz"}
    (engine,) = documents("engine.yaml")
    (group,) = engine["spec"]["securityContext"]["supplementalGroups"]
    assert (group,) == tuple(config.allow[0].gids) == (pod["securityContext"]["runAsGroup"],)
    assert config.host_bytes + (2 << 30) == 10 << 30, container["resources"]["limits"]["memory"]


def test_nobody_gets_a_privilege(pod):
    (engine,) = documents("engine.yaml")
    for container in (*pod["containers"], *engine["spec"]["containers"]):
        rights = container["securityContext"]
        assert rights["capabilities"] == {"drop": ["ALL"]}
        assert (rights["allowPrivilegeEscalation"], rights["readOnlyRootFilesystem"]) == (False, True)
    assert pod["securityContext"]["runAsNonRoot"] and engine["spec"]["securityContext"]["runAsNonRoot"]
    assert not {"hostNetwork", "hostIPC", "hostPID"} & engine["spec"].keys()
