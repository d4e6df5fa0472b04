"""All sources of the configuration in, a :class:`Config` out; or every fault, each with its source, key and reason."""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from pydantic import ValidationError
from pydantic_core import ErrorDetails
from pydantic_settings import SettingsError

from kvtierd.config.describe import bounds, what
from kvtierd.config.keys import ENV_PREFIX, KEYS, Config

__all__ = ["ENV_PREFIX", "ConfigError", "Loaded", "load", "read"]

_OUT_OF_BOUNDS: Final = frozenset({"greater_than", "greater_than_equal", "less_than", "less_than_equal"})
_EMPTY: Final = frozenset({"too_short", "string_too_short"})
_EXPECTED: Final = frozenset({"literal_error", "enum"})
_IN_WORDS: Final[Mapping[str, str]] = {
    "bool": "true or false",
    "float": "a number",
    "int": "an integer",
    "model": "a table",
    "path": "a path",
    "string": "text",
    "tuple": "a list",
}
"""By what a kind of fault begins with: what pydantic says of these is about Python."""

_KEY: Final = re.compile(r"\w+")


class ConfigError(Exception):
    """The configuration is refused: one line a fault."""


@dataclass(slots=True, frozen=True)
class Source:
    """Where a value comes from: ``place`` (a file and line, the environment, the command line) and its name there."""

    place: str
    name: str

    def __str__(self) -> str:
        return f"{self.place}: {self.name}"


@dataclass(slots=True, frozen=True)
class Loaded:
    """``sources``: by key; absent = its default."""

    config: Config
    sources: Mapping[str, Source]

    def located(self, fault: str) -> str:
        """With the source of the key that it begins with, if it does and that has one."""
        return _conflict(fault, self.sources)


@dataclass(slots=True, frozen=True)
class _File:
    """``lines``: to find keys in, for a TOML parser does not tell where they stood."""

    path: Path
    lines: Sequence[str]
    values: Mapping[str, Any]

    @classmethod
    def read(cls, path: Path) -> Self:
        try:
            text = path.read_text()
            return cls(path, text.splitlines(), tomllib.loads(text))
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: {error}") from error

    def source(self, name: str, inside: Sequence[int | str] = ()) -> Source:
        """Of a key; ``inside``: the place in a list of tables, then the key of that table."""
        return Source(f"{self.path}:{self._line(name, inside)}", name)

    def _line(self, name: str, inside: Sequence[int | str]) -> int:
        headers = self._matching(rf"\s*\[+\s*{re.escape(name)}\s*[].]")
        if not headers:
            return next(iter(self._matching(rf"\s*\"?{re.escape(name)}\"?\s*[.=]")), 1)
        table = inside[0] if inside and isinstance(inside[0], int) and inside[0] < len(headers) else 0
        first = headers[table]
        following = self._matching(r"\s*\[", first + 1)
        end = following[0] if following else len(self.lines) + 1
        wanted = self._matching(rf"\s*\"?{re.escape(str(inside[1]))}\"?\s*[.=]", first + 1) if len(inside) > 1 else []
        return wanted[0] if wanted and wanted[0] < end else first

    def _matching(self, pattern: str, first: int = 1) -> list[int]:
        """Numbers, from 1, of the lines from ``first`` on that begin so."""
        return [number for number, line in enumerate(self.lines, 1) if number >= first and re.match(pattern, line)]


def load(file: Path | None, flags: Mapping[str, object]) -> Config:
    """See :func:`read`."""
    return read(file, flags).config


def read(file: Path | None, flags: Mapping[str, object]) -> Loaded:
    """The configuration of all sources. ``flags``: those given, by key. Raises :class:`ConfigError`."""
    in_file = _File.read(file) if file is not None else None
    in_env = {key[len(ENV_PREFIX) :].lower(): key for key in os.environ if key.upper().startswith(ENV_PREFIX)}
    in_env.pop("config", None)  # names the file
    sources = {name: in_file.source(name) for name in in_file.values} if in_file is not None else {}
    sources |= {name: Source("environment", variable) for name, variable in in_env.items()}
    sources |= {name: Source("command line", f"--{name.replace('_', '-')}") for name in flags}
    unknown = [f"{source}: there is no such key{_meant(name)}" for name, source in sources.items() if name not in KEYS]
    below_env = {name: value for name, value in in_file.values.items() if name not in in_env} if in_file else {}
    said = below_env | {name: os.environ[variable] for name, variable in in_env.items()} | dict(flags)
    known = {name: value for name, value in {**below_env, **flags}.items() if name in KEYS}
    try:
        config = Config(**known)
    except ValidationError as error:
        # Without what an unknown key was meant for, what keys say together is not known.
        faults = [fault for fault in _own(error.errors()) if fault["loc"] or not unknown]
        lines = [*unknown, *(_fault(fault, said, sources, in_file) for fault in faults)]
        raise ConfigError("\n".join(lines)) from error
    except SettingsError as error:
        raise ConfigError("\n".join([*unknown, _unreadable(error, in_env)])) from error
    if unknown:
        raise ConfigError("\n".join(unknown))
    return Loaded(config, sources)


def _meant(name: str) -> str:
    close = difflib.get_close_matches(name, KEYS, n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _unreadable(error: SettingsError, in_env: Mapping[str, str]) -> str:
    """Of a variable that should be JSON, which only the message names."""
    for name, variable in in_env.items():
        if f'"{name}"' in str(error):
            source = Source("environment", variable)
            return f"{source} = {os.environ[variable]!r}: must be a JSON list: {error.__cause__}"
    return f"environment: {error}"


def _own(faults: Sequence[ErrorDetails]) -> list[ErrorDetails]:
    """Without what follows from others: a list whose only elements are wrong is told to be too short, too."""
    inside = {fault["loc"][:depth] for fault in faults for depth in range(len(fault["loc"]))}
    return [fault for fault in faults if fault["type"] != "too_short" or fault["loc"] not in inside]


def _conflict(fault: str, sources: Mapping[str, Source]) -> str:
    """Of several keys: the check says which, the first is the one to look at."""
    found = _KEY.match(fault)
    source = sources.get(found[0]) if found is not None else None
    return fault if found is None or source is None else f"{source}{fault[found.end() :]}"


def _fault(fault: ErrorDetails, said: Mapping[str, object], sources: Mapping[str, Source], file: _File | None) -> str:
    """``said``: the values as they stood in their sources, which a validator may have turned into others."""
    reason = fault["msg"].removeprefix("Value error, ")
    if not fault["loc"]:
        return "\n".join(_conflict(line, sources) for line in reason.splitlines())
    name, *inside = fault["loc"]
    key = str(name)
    source = sources.get(key, Source("default", key))
    if file is not None and inside and source.place.startswith(f"{file.path}:"):
        source = file.source(key, inside)
    if fault["type"] in _OUT_OF_BOUNDS:
        reason = f"must be {_limits(fault['ctx']) if inside else bounds(KEYS[key])}"
    elif fault["type"] in _EXPECTED:
        reason = f"must be {fault['ctx']['expected']}"
    elif (kind := _IN_WORDS.get(fault["type"].partition("_")[0])) is not None:
        known = "" if inside else bounds(KEYS[key])
        reason = (
            f"must be {f'a {what(KEYS[key])}' if kind == 'a list' and not inside else kind}{known and f', {known}'}"
        )
    where = "".join(f"[{step}]" for step in inside)
    if fault["type"] == "missing":
        return f"{source}{where}: must be given"
    if fault["type"] == "extra_forbidden":
        return f"{source}{where}: there is no such key"
    if fault["type"] in _EMPTY:
        reason = "must not be empty"
    value = fault["input"] if inside else said.get(key, fault["input"])
    return f"{source}{where} = {value!r}: {reason}"


def _limits(context: Mapping[str, object]) -> str:
    """Of an element, which has no field of its own to be told from."""
    words = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
    return " and ".join(f"{words[name]} {limit}" for name, limit in context.items())
