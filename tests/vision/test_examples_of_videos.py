"""The examples about video models, and the code of their page: it needs diffusers, which other tests do without."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.pages import CODE
from tools import vision_tests

pytest.importorskip("diffusers", reason="make test-vision installs it")

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


def python(*arguments: str, folder: Path) -> str:
    command = [sys.executable, "-W", "ignore", *arguments]
    done = subprocess.run(
        command, cwd=folder, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_training_a_tiny_video_transformer(tmp_path, monkeypatch):
    monkeypatch.setenv("SCRATCH", str(tmp_path))
    output = python(str(EXAMPLES / "video_lora.py"), folder=tmp_path)
    losses = re.findall(r"loss ([\d.]+)", output)
    assert len(losses) == 8
    assert float(losses[-1]) < float(losses[0])
    assert "forwards 8, recomputes 8" in output
    assert "blocks.0-3.ffn x4 [tile] calls 16, tiles 96" in output


def test_the_code_on_the_page(tmp_path):
    blocks = [block["code"] for block in CODE.finditer((ROOT / "docs/frameworks/diffusion.md").read_text())]
    assert blocks
    for code in blocks:
        (tmp_path / "block.py").write_text(code)
        python("block.py", folder=tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("factory", ["wan_14b_720p", "hunyuan_13b_720p"])
def test_the_stored_plans_are_those_of_today(factory):
    stored = json.loads((ROOT / "docs/video_plans.json").read_text())["plans"][factory]
    assert vision_tests.plan(factory, stored[0]["policy"]) == stored[0]
