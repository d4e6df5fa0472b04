"""Configuration: a TOML file, ``KVTIERD_*`` in the environment, command-line flags; the later wins.

- ``keys``: every key. **To add a key, add a field there**: file, environment, flag, ``--help``, ``--print-config`` and
  ``docs/configuration.md`` follow from it.
- ``load``: reads the sources and reports their faults.
"""

from kvtierd.config.keys import ENV_PREFIX, LIVE, Config
from kvtierd.config.load import ConfigError, Loaded, read

__all__ = ["ENV_PREFIX", "LIVE", "Config", "ConfigError", "Loaded", "read"]
