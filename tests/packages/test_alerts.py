"""The alert rules, as Prometheus's own tool reads them. That they ask for metrics that exist: tests/integration."""

import subprocess

import debian
import pytest

from tests.packages.source import ROOT

pytestmark = [pytest.mark.long, pytest.mark.limit(600)]


@pytest.fixture(scope="module")
def promtool(tmp_path_factory):
    """From Debian's package, which is not installed: that would start a server."""
    if why := debian.reason_to_skip({"dpkg-deb": "dpkg"}):
        pytest.skip(why)
    work = tmp_path_factory.mktemp("prometheus")
    subprocess.run(["apt-get", "-qq", "update"], check=True)
    subprocess.run(["apt-get", "-qq", "download", "prometheus"], cwd=work, check=True)
    (package,) = work.glob("prometheus_*.deb")
    subprocess.run(["dpkg-deb", "-x", package, work], check=True)
    return work / "usr/bin/promtool"


def said(*command):
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def test_promtool_accepts_the_rules(promtool):
    assert "15 rules found" in said(promtool, "check", "rules", ROOT / "deploy/alerts.yml")


def test_a_lost_tier_and_a_daemon_that_does_not_answer_fire(promtool, tmp_path):
    (tmp_path / "test.yml").write_text(f"""
rule_files: [{ROOT / "deploy/alerts.yml"}]
evaluation_interval: 1m
tests:
  - interval: 1m
    input_series:
      - {{ series: 'up{{job="kvtier", instance="a"}}', values: '1 1 0 0 0 0 0 0' }}
      - {{ series: 'kvtier_tier_lost{{instance="b", cache="c", tier="disk"}}', values: '0 0 1 1 1 1 1 1' }}
    alert_rule_test:
      - {{ eval_time: 1m, alertname: KvtierDown }}
      - {{ eval_time: 1m, alertname: KvtierTierLost }}
      - eval_time: 7m
        alertname: KvtierDown
        exp_alerts:
          - exp_labels: {{ severity: critical, job: kvtier, instance: a }}
            exp_annotations:
              summary: "kvtierd on a does not answer: engines there compute every prefix anew"
      - eval_time: 7m
        alertname: KvtierTierLost
        exp_alerts:
          - exp_labels: {{ severity: critical, instance: b, cache: c, tier: disk }}
            exp_annotations:
              summary: "cache c on b does without its disk tier"
""")
    said(promtool, "test", "rules", tmp_path / "test.yml")
