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
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NoReturn, get_origin

import click

from kvtierd.config import ENV_PREFIX, Config, ConfigError, load
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


def _with_config_flags(command: Callable[..., None]) -> Callable[..., None]:
    """One flag for each field of the configuration, which also checks its value."""
    for name, field in reversed(Config.model_fields.items()):
        flag = f"--{name.replace('_', '-')}"
        options: dict[str, Any] = {"default": None, "help": field.description}
        if field.annotation is bool:
            flag = f"{flag}/--no-{name.replace('_', '-')}"
        elif get_origin(field.annotation) is tuple:
            options["multiple"] = True
        command = click.option(flag, name, **options)(command)
    return command


@click.command()
@click.option(
    "--config", "file", type=click.Path(path_type=Path), envvar=f"{ENV_PREFIX}CONFIG", help="Configuration file (TOML)."
)
@_with_config_flags
def main(file: Path | None, **flags: Any) -> None:
    """Keeps the KV cache of LLM inference engines in tiers of device, host and disk memory.

    Every flag is also a key of the configuration file, and KVTIERD_<KEY> in the environment.
    """
    given = {name: value for name, value in flags.items() if value is not None and value != ()}
    try:
        config = load(file, given)
    except ConfigError as error:
        _fail(EXIT_BAD_CONFIG, str(error))
    _set_up_logging(config.log_level)
    _raise_descriptor_limit()
    try:
        clean = asyncio.run(_run(config))
    except TierConfigError as error:
        _fail(EXIT_BAD_CONFIG, str(error))
    except (TierError, OSError, RuntimeError) as error:
        _log.debug("start failed", exc_info=error)
        _fail(EXIT_FAILED, str(error))
    if not clean:
        # A thread may hang in a call to a device or a disk, and would keep the process alive for as long.
        sys.stderr.flush()
        os._exit(EXIT_UNCLEAN)


async def _run(config: Config) -> bool:
    """Until a signal asks for the end. Returns whether it ended cleanly."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    daemon = await Daemon.start(config)
    click.echo(f"kvtierd ready pid={os.getpid()} address={daemon.address}")
    sys.stdout.flush()
    await stop.wait()
    _log.info("stopping")
    clean = await daemon.stop()
    _log.info("stopped clean=%s", clean)
    return clean


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
