"""The ``kvtier`` command.

Exit status, of every command: 0 = done; 1 = refused, failed, only partly done, or no daemon answers; 2 = the command
line makes no sense. `explain` and `watch` have more: see there.
"""

from __future__ import annotations

import click

# Under other names than their modules, which would be hidden otherwise.
from kvtier.cli.bench import bench as bench_commands
from kvtier.cli.blocks import drop as drop_command
from kvtier.cli.blocks import move as move_command
from kvtier.cli.blocks import pin as pin_command
from kvtier.cli.blocks import unpin as unpin_command
from kvtier.cli.bridge import bridge as bridge_commands
from kvtier.cli.caches import cache as cache_commands
from kvtier.cli.caches import reset as reset_command
from kvtier.cli.doctor import doctor as doctor_command
from kvtier.cli.explain import explain as explain_command
from kvtier.cli.leases import kick as kick_command
from kvtier.cli.leases import leases as leases_command
from kvtier.cli.replay import replay as replay_command
from kvtier.cli.status import status as status_command
from kvtier.cli.top.command import top as top_command
from kvtier.cli.watch import watch as watch_command


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="kvtier")
def main() -> None:
    """Look at a kvtier daemon, follow what it does, step in by hand, and put it under real load.

    Exit status: 0 done; 1 refused, failed, only partly done, or no daemon answers; 2 the command line makes no sense.
    Watch has more: see kvtier watch --help.
    """


for command in (
    watch_command,
    status_command,
    top_command,
    explain_command,
    leases_command,
    kick_command,
    move_command,
    drop_command,
    pin_command,
    unpin_command,
    reset_command,
    cache_commands,
    replay_command,
    doctor_command,
    bridge_commands,
    bench_commands,
):
    main.add_command(command)
