"""``kvtierd``: configuration in, a daemon until SIGTERM or SIGINT, an exit status.

0: stopped cleanly. 1: could not start, or run. 2: bad configuration. 3: stopped, but not cleanly.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

import click

from kvtierd.config import ENV_PREFIX, Config, ConfigError, LiveConfig, Loaded, read
from kvtierd.config.describe import as_json, as_toml, reference
from kvtierd.config.flags import given, with_flags
from kvtierd.service.daemon import Daemon
from kvtierd.tiers.base import TierConfigError, TierError

EXIT_FAILED: Final = 1
EXIT_BAD_CONFIG: Final = 2
EXIT_UNCLEAN: Final = 3

_log = logging.getLogger(__name__)


class _KeyValueFormatter(logging.Formatter):
    """``time=… level=… where=… event=…``; messages carry their own key=value pairs behind the event."""

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        head = f"time={stamp}.{int(record.msecs):03}Z level={record.levelname.lower()} where={record.name}"
        line = f"{head} {record.getMessage()}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


@click.command()
@click.option(
    "--config", "file", type=click.Path(path_type=Path), envvar=f"{ENV_PREFIX}CONFIG", help="Configuration file (TOML)."
)
@click.option("--check-config", is_flag=True, help="Say whether the configuration is right; start nothing.")
@click.option("--print-config", is_flag=True, help="Print what is in effect and where it comes from; start nothing.")
@click.option("--json", "as_json_text", is_flag=True, help="With --print-config: JSON instead of TOML.")
@click.option("--config-reference", is_flag=True, help="Print docs/configuration.md; start nothing.")
@with_flags
def main(
    file: Path | None, check_config: bool, print_config: bool, as_json_text: bool, config_reference: bool, **flags: Any
) -> None:
    """Keeps the KV cache of LLM inference engines in tiers of device, host and disk memory.

    Every key is a flag here, a key of the configuration file, and KVTIERD_<KEY> in the environment.
    """
    if as_json_text and not print_config:
        raise click.UsageError("--json goes with --print-config")
    if config_reference:
        click.echo(reference(), nl=False)
        return
    sources = Sources(file, given(flags))
    try:
        loaded = sources.read()
    except ConfigError as error:
        _fail(EXIT_BAD_CONFIG, str(error))
    if print_config:
        click.echo((as_json if as_json_text else as_toml)(loaded.config, loaded.sources))
    elif check_config:
        click.echo("kvtierd: the configuration is right")
    else:
        _serve(sources, loaded.config)


@dataclass(slots=True, frozen=True)
class Sources:
    """What the configuration is read from, at the start and at each reload (besides the environment)."""

    file: Path | None
    flags: Mapping[str, object]

    def read(self) -> Loaded:
        """Raises :class:`ConfigError`."""
        return read(self.file, self.flags)


def _serve(sources: Sources, config: Config) -> None:
    """Until asked to stop. Returns if that was clean, else the process ends here."""
    _set_up_logging(config.log_level)
    _raise_descriptor_limit()
    try:
        clean = asyncio.run(_run(sources, config))
    except TierConfigError as error:
        _fail(EXIT_BAD_CONFIG, str(error))
    except (TierError, OSError, RuntimeError) as error:
        _log.debug("start failed", exc_info=error)
        _fail(EXIT_FAILED, str(error))
    if not clean:
        # A thread may hang in a call to a device or a disk, and would keep the process alive for as long.
        sys.stderr.flush()
        os._exit(EXIT_UNCLEAN)


async def _run(sources: Sources, config: Config) -> bool:
    """Until a signal asks for the end. Returns whether it ended cleanly."""
    loop = asyncio.get_running_loop()
    stop, reload = asyncio.Event(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    loop.add_signal_handler(signal.SIGHUP, reload.set)  # before the start, which one that comes early would else end
    daemon = await Daemon.start(config)
    daemon.live.on_change(lambda now: logging.getLogger().setLevel(now.log_level.upper()))
    reloading = loop.create_task(_reload_when_asked(reload, sources, daemon.live), name="reload")
    tcp = f" tcp={daemon.tcp_address}" if daemon.tcp_address else ""
    click.echo(f"kvtierd ready pid={os.getpid()} address={daemon.address}{tcp}")
    sys.stdout.flush()
    await stop.wait()
    reloading.cancel()
    _log.info("stopping")
    clean = await daemon.stop()
    _log.info("stopped clean=%s", clean)
    return clean


async def _reload_when_asked(asked: asyncio.Event, sources: Sources, live: LiveConfig) -> None:
    """One reload after the other; what is asked for during one is done once more after it."""
    while True:
        await asked.wait()
        asked.clear()
        try:
            fresh = await asyncio.to_thread(sources.read)
        except ConfigError as error:
            live.refuse(str(error))
        else:
            live.reload(fresh.config)


def _set_up_logging(level: str) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_KeyValueFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def _raise_descriptor_limit() -> None:
    """Each session takes two descriptors and each cache about ten; the usual soft limit of 1,024 is soon reached."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _fail(status: int, message: str) -> NoReturn:
    for line in message.splitlines():
        click.echo(f"kvtierd: {line}", err=True)
    sys.exit(status)


if __name__ == "__main__":
    main()
