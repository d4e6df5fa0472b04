"""Configuration: a TOML file, ``KVTIERD_*`` in the environment, command-line flags; the later wins.

- ``keys``: every key, by section. **To add one, add a field there**: file, environment, flags, ``--help``,
  ``--print-config`` and ``docs/configuration.md`` follow from it.
- ``kinds``: what values there are besides numbers and text, and the mark of a key that can change at a reload.
- ``load``: sources in, a :class:`Config` or every fault of it out.
- ``describe``: a configuration as TOML or JSON, and the reference.
- ``flags``: the command line's part.
- ``live``: what a running daemon reads, and how it changes.
"""

from kvtierd.config.keys import Config
from kvtierd.config.live import LiveConfig
from kvtierd.config.load import ENV_PREFIX, ConfigError, Loaded, load, read

__all__ = ["ENV_PREFIX", "Config", "ConfigError", "LiveConfig", "Loaded", "load", "read"]
