"""The `bash` blocks of the documents run in order, unchanged."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import readme
from processes import xla_flags

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(page for page in (ROOT / "docs").glob("*.md") if "```bash" in page.read_text(encoding="utf-8"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_bash_blocks_run(page, tmp_path):
    shutil.copy(ROOT / "train.py", tmp_path)
    environment = dict(os.environ, XLA_FLAGS=xla_flags(1))
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment["PYTHONPATH"] = str(ROOT)
    for block in readme.fenced_blocks(page.read_text(encoding="utf-8")):
        if block.language == "bash":
            done = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", block.text],
                cwd=tmp_path,
                env=environment,
                capture_output=True,
                text=True,
                check=False,
            )
            assert done.returncode == 0, f"{block.text}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"


def test_documents_contain_bash_blocks():
    assert [page.name for page in PAGES] == ["interop.md", "usage.md"]
