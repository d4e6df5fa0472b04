from __future__ import annotations

from typing import Any

from kvtierd.config import Config, LiveConfig, load


def live(**values: Any) -> tuple[LiveConfig, list[Config]]:
    config = LiveConfig(fresh(**values))
    told: list[Config] = []
    config.on_change(told.append)
    return config, told


def fresh(**values: Any) -> Config:
    return load(None, {"host_bytes": 4096} | values)


def test_what_is_live_changes_together_and_once() -> None:
    config, told = live()
    config.reload(fresh(wait_seconds="5s", heartbeat_seconds=1))
    assert (config.now.wait_seconds, config.now.heartbeat_seconds) == (5.0, 1.0)
    assert told == [config.now]
    assert config.problems == ()


def test_what_takes_a_restart_keeps_its_value_and_is_named() -> None:
    config, told = live()
    config.reload(fresh(host_bytes=8192, state_dir="/elsewhere", wait_seconds=5))
    assert (config.now.host_bytes, config.now.wait_seconds) == (4096, 5.0)
    assert len(told) == 1
    assert [problem.split()[1] for problem in config.problems] == ["host_bytes", "state_dir"]


def test_a_refusal_ends_with_a_reload_that_has_nothing_to_refuse() -> None:
    config, told = live()
    config.reload(fresh(host_bytes=8192))
    assert config.problems and not told
    config.reload(fresh())
    assert not config.problems


def test_broken_sources_change_nothing() -> None:
    config, told = live(wait_seconds=7)
    config.refuse("kvtierd.toml:3: wait_seconds = 0: must be above 0 to 1h")
    assert (config.now.wait_seconds, told) == (7.0, [])
    assert config.problems == ("configuration: not reloaded: kvtierd.toml:3: wait_seconds = 0: must be above 0 to 1h",)
