"""``kvtierd``: configuration in, a daemon until SIGTERM or SIGINT, an exit status.

0: stopped cleanly. 1: could not start. 2: bad configuration. 3: stopped, but not cleanly.

Modules that only a daemon needs are imported in functions: commands for the configuration, and the supervisor, do
without them.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import resource
import sys
import traceback
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, NoReturn

import click

from kvtierd import logs
from kvtierd.config import ENV_PREFIX, ConfigError, Loaded, read
from kvtierd.config.keys import RemoteConfig
from kvtierd.config.load import DaemonCommand, as_json, given, reference, with_flags

EXIT_FAILED: Final = 1
EXIT_BAD_CONFIG: Final = 2
UMASK: Final = 0o077
"""Keeps files and directories that libraries make private to the owner, whatever umask the parent process had."""
SWITCH_S: Final = 0.0005
"""Seconds that a thread may keep the interpreter lock from another. Python's default of 5 ms is as long as a disk takes
for a batch: the thread that checks blocks and the loop's thread would wait for each other instead of for the disk."""

_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_log = logging.getLogger(__name__)


@click.command(cls=DaemonCommand, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="kvtier", prog_name="kvtierd")
@click.option(
    "--config", "file", type=click.Path(path_type=Path), envvar=f"{ENV_PREFIX}CONFIG", help="Configuration file (TOML)."
)
@click.option("--check-config", is_flag=True, help="Say whether the configuration is right; start nothing.")
@click.option("--print-config", is_flag=True, help="Print what is in effect, and its sources; start nothing.")
@click.option("--config-reference", is_flag=True, help="Print docs/configuration.md; start nothing.")
@click.option("--supervise", "supervised", is_flag=True, help="Keep the memory tiers over crashes, without systemd.")
@with_flags
def main(
    file: Path | None, check_config: bool, print_config: bool, config_reference: bool, supervised: bool, **flags: Any
) -> None:
    """Keeps the KV cache of LLM inference engines in tiers of device, host and disk memory.

    Every key is a flag here, a key of the configuration file, and KVTIERD_<KEY> in the environment.
    """
    if config_reference:
        click.echo(reference(), nl=False)
        return
    set_here = given(flags)
    try:
        loaded = read(file, set_here)
    except ConfigError as error:
        _fail(EXIT_BAD_CONFIG, str(error))
    if print_config:
        click.echo(as_json(loaded))
    elif check_config:
        _check_files(loaded)
        click.echo("kvtierd: the configuration is right")
    elif supervised:
        from kvtierd.supervise import own_command, supervise

        os.umask(UMASK)
        logs.set_up(loaded.config.log_level)
        sys.exit(supervise(own_command([argument for argument in sys.argv[1:] if argument != "--supervise"])))
    else:
        _serve(file, set_here, loaded)


def _check_files(loaded: Loaded) -> None:
    """Ends the process if a start could not use a TLS file, the store or a tier. Warns of shrunken caches."""
    from kvtierd.service.budgets import require_possible
    from kvtierd.service.promises import shortages
    from kvtierd.tiers.base import TierConfigError

    tcp = loaded.config.tcp
    tls = loaded.config.peer_tls if tcp is None else tcp.tls
    faults = [] if tls is None else [f"{name} = {path}: {reason}" for name, path, reason in tls.faults()]
    if loaded.config.remote is not None:
        faults += _store_faults(loaded.config.remote)
    try:
        for warning in filter(None, (require_possible(loaded.config), *shortages(loaded.config))):
            click.echo(logs.marked(f"kvtierd: warning: {warning}", logging.WARNING), err=True)
    except TierConfigError as error:
        faults.append(str(error))
    if faults:
        _fail(EXIT_BAD_CONFIG, "\n".join(loaded.located(fault) for fault in faults))


def _store_faults(config: RemoteConfig) -> list[str]:
    """The faults for which a start would refuse the store."""
    import asyncio

    from kvtierd.service.remote.tier import opened_store
    from kvtierd.tiers.base import TierConfigError

    async def try_out() -> None:
        await (await opened_store(config)).close()

    try:
        asyncio.run(try_out())
    except TierConfigError as error:
        return [str(error)]
    return []


def _serve(file: Path | None, flags: Mapping[str, object], loaded: Loaded) -> None:
    """Serves until asked to stop. Returns after a clean stop; otherwise ends the process."""
    config = loaded.config
    os.umask(UMASK)
    logs.set_up(config.log_level)
    told = config.model_dump(mode="json", include=set(loaded.sources))
    _log.info("kvtierd starts version=%s file=%s set=%r", version("kvtier"), file, told)
    gc.disable()  # until the daemon serves: almost every object made before that lives as long as the process
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy would start an unused thread per core
    # gRPC's own lines are not log records, and any client that reaches the TCP port could cause any number of them.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    import asyncio

    from kvtierd.notify import Notifier, passed_fds, watchdog_interval_s
    from kvtierd.serve import serve
    from kvtierd.tiers.base import TierConfigError, TierError

    _raise_descriptor_limit()
    _map_large_memory()
    sys.setswitchinterval(SWITCH_S)
    try:
        notifier = Notifier.from_environment(os.environ)
        watchdog_s, passed = watchdog_interval_s(os.environ), passed_fds(os.environ)
    except (ValueError, OSError) as error:
        _fail(EXIT_BAD_CONFIG, f"environment: {error}")
    try:
        with asyncio.Runner() as runner:
            status = runner.run(serve(partial(read, file, flags), config, notifier, watchdog_s, passed))
            if status:
                # A thread may hang in a call to a device or a disk; the runner would wait for it.
                sys.stderr.flush()
                os._exit(status)
    except (TierError, OSError, RuntimeError) as error:
        _log.debug("start failed", exc_info=error)
        said = loaded.located(str(error)) if isinstance(error, TierConfigError) else str(error)
        notifier.status(f"failed: {said}")
        _fail(EXIT_BAD_CONFIG if isinstance(error, TierConfigError) else EXIT_FAILED, said)


def _raise_descriptor_limit() -> None:
    """Raises the soft limit to the hard limit: a session takes four descriptors and a cache 13, too many for 1,024."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _map_large_memory() -> None:
    """Fixes glibc's threshold for mapped memory at 2 MiB, which frees would otherwise raise. LMDB's list of dirty
    pages, 2 MiB a cache, then takes only touched pages; on the heap it would be filled with zeros. Messages are
    smaller."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 2 << 20)
        mallopt(_M_TRIM_THRESHOLD, 4 << 20)  # twice the other threshold, as in glibc


def _fail(status: int, message: str) -> NoReturn:
    for line in message.splitlines():
        click.echo(logs.marked(f"kvtierd: {line}", logging.ERROR), err=True)
    sys.exit(status)


def run() -> NoReturn:
    """Runs :func:`main`, then ends the process at once: the kernel frees its memory faster than the interpreter, which
    would free block by block."""
    status: int | str | None = EXIT_FAILED
    try:
        main()
    except SystemExit as end:
        status = end.code
    except BaseException:  # noqa: BLE001  printed; the process ends
        traceback.print_exc()
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # the reader may be gone
            stream.flush()
    os._exit(status if isinstance(status, int) else EXIT_FAILED if status else 0)


if __name__ == "__main__":
    run()
