"""Trains diffusion and vision models under every policy and writes down how that went: `make test-vision`.

The record (`docs/vision.json`) has every test of `tests/vision` with its outcome, and the versions of the packages; the
table in `docs/frameworks/diffusion.md` is held to it by a test. With `--plans`, the plans of the video models in
`examples/video_plan.py` are made instead, for `docs/video_plans.json`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "docs" / "vision.json"
PLANS = ROOT / "docs" / "video_plans.json"
WHEEL = ROOT / "tests" / "support" / "torchvision_without_cuda"
"""Lets torchvision's wheel import beside a torch without CUDA; the tests see to that themselves."""
PACKAGES = ("torch", "diffusers", "timm", "peft")
FACTORIES = ("wan_14b_720p", "hunyuan_13b_720p")
POLICIES = ("recompute", "recompute+offload", "recompute+offload+tile(mlp)", "recompute(keep=attention)+offload")
DEVICE = "H100"


def main(arguments: list[str]) -> int:
    if arguments == ["--plans"]:
        write(PLANS, {"packages": versions(), "device": DEVICE, "plans": {name: plans(name) for name in FACTORIES}})
        return 0
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.xml"
        command = [sys.executable, "-m", "pytest", "tests/vision", f"--junitxml={results}", *arguments]
        code = subprocess.run(command, cwd=ROOT, check=False).returncode
        if results.exists() and not arguments:
            write(RECORD, {"packages": versions(), "tests": outcomes(results)})
    return code


def versions() -> dict[str, str]:
    return {package: metadata.version(package) for package in PACKAGES}


def outcomes(results: Path) -> dict[str, str]:
    """Return how each test went: passed, failed or skipped."""
    found = {}
    for case in ET.parse(results).iter("testcase"):  # noqa: S314  (pytest has just written it)
        tags = {child.tag for child in case}
        failed = bool(tags & {"failure", "error"})
        name = f"{case.get('classname', '').rpartition('.')[2]}.py::{case.get('name')}"
        found[name] = "failed" if failed else "skipped" if "skipped" in tags else "passed"
    return found


def plans(factory: str) -> list[dict[str, Any]]:
    """Plan one video model under each policy, and return what the page shows of it."""
    return [plan(factory, policy) for policy in POLICIES]


def plan(factory: str, policy: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        to = Path(folder) / "plan.json"
        command = [sys.executable, "-W", "ignore", "-m", "lowtide", "plan", f"video_plan:{factory}"]
        options = ["--device", DEVICE, "--policy", policy, "--format", "json", "-o", str(to)]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, [str(WHEEL), os.environ.get("PYTHONPATH")]))
        }
        subprocess.run(  # its code is 1 where the plan does not fit
            [*command, *options], cwd=ROOT / "examples", env=environment, check=False
        )
        (candidate,) = json.loads(to.read_text())["candidates"]
    estimate = candidate["estimate"]
    figures = {name: estimate[name] for name in ("policy", "host_bytes", "seconds")}
    return figures | {"fits": candidate["fits"], "device_bytes": candidate["device_bytes"]}


def write(path: Path, record: dict[str, Any]) -> None:
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(f"{path.relative_to(ROOT)} is written")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
