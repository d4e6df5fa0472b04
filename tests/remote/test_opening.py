"""URLs of stores: what is wrong with one is said without what is secret in it."""

import subprocess
import sys
from pathlib import Path

import pytest

from kvtierd.tiers.base import TierConfigError
from kvtierd.tiers.remote.opening import FIELD, open_store


@pytest.mark.parametrize(
    ("url", "shown", "limit"),
    [
        ("", "", "must begin with one of s3://, "),
        ("/directory", "/directory", "must begin with one of s3://, "),
        ("ftp://host/x", "ftp://host/x", "must begin with one of s3://, "),
        ("s3://[", "s3://[", "must be a URL"),
        ("s3://", "s3://", "must name a bucket"),
        ("s3://secret:secret@bucket/x", "s3://bucket/x", "must not have credentials"),
        ("mooncake://secret@host:1", "mooncake://host:1", "must not have credentials"),
        ("s3://bucket/x?key=secret", "s3://bucket/x", "must not have a query"),
        ("file://directory", "file://directory", "must be file:// and the absolute path of a directory"),
        ("file:///nothing/there", "file:///nothing/there", "must be file:// and the absolute path of a directory"),
        ("mooncake:///x", "mooncake:///x", "must be mooncake://host:port/prefix"),
        ("mooncake://host:no/x", "mooncake://host:no/x", ""),
        ("mooncake://host/x?secret=1", "mooncake://host/x", "with any of protocol, devices, metadata in its query"),
    ],
)
def test_a_wrong_url_is_refused_with_field_value_and_limit(url: str, shown: str, limit: str) -> None:
    with pytest.raises(TierConfigError) as refused:
        open_store(url)
    assert (refused.value.field, refused.value.value) == (FIELD, shown)
    assert limit in refused.value.limit
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("url", "module", "extra"), [("s3://bucket", "obstore", "remote"), ("mooncake://host", "mooncake", "mooncake")]
)
def test_an_engine_that_is_not_installed_says_how(tmp_path: Path, url: str, module: str, extra: str) -> None:
    script = (
        "import sys; from importlib.machinery import PathFinder as Finder; found = Finder.find_spec\n"
        f"Finder.find_spec = lambda name, *more: None if name == {module!r} else found(name, *more)\n"
        f"from kvtierd.tiers.remote.opening import open_store; open_store({url!r})"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert f"{FIELD} = {url}: needs pip install '.[{extra}]' in a clone of kvtier" in run.stderr
