"""The code of docs/engines.md with transformers of the version that vLLM pins, and with the oldest version."""

import re
import subprocess

import pytest

from tests.engines.conftest import folders, require
from tests.engines.engines import ROOT, START_S, environment
from tests.integration.conftest import pool, start_fresh

pytestmark = [pytest.mark.engines, pytest.mark.limit(300)]

__all__ = ["pool", "start_fresh"]

PAGE = (ROOT / "docs/engines.md").read_text()
MODEL = "from pathlib import Path\nfrom tests.connectors import tiny\ntiny.save(Path('my-model'))\n"


@pytest.mark.parametrize("version", ["vllm", "transformers"], ids=["pinned-by-vllm", "oldest"])
def test_a_prompt_is_computed_once(engines, start_fresh, tmp_path, version):
    python = require(engines, version)
    daemon = start_fresh("--host-bytes", "64MiB", "--disk-bytes", "64MiB")
    (code,) = re.findall(r"^```python runnable\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    variables = environment(*folders(engines, version)) | {"KVTIER_ADDRESS": daemon.address}
    command = [python, "-c", MODEL + code]
    done = subprocess.run(
        command, env=variables, cwd=tmp_path, capture_output=True, text=True, timeout=START_S, check=False
    )
    assert done.stdout == "0 tokens loaded, 32 stored\n32 tokens loaded, 48 stored\n", done.stderr
