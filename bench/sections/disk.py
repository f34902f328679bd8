"""The disk tier: `bench/disk.py` measures it in fresh processes, and its own file is the stored result."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.figures import Figure, Result, measured, path_of
from bench.section import Bars, Rivalry

if TYPE_CHECKING:
    from bench.section import Say

TITLE = "The disk tier"
ABOUT = """\
A Llama of about 90M parameters on the CPU, {tokens} tokens, fp32, with each set-up in a fresh process. Bytes are what
the operating system counts for the process, beyond the model and its gradients. The regions' inputs are {boundary}; the
last two set-ups show how much of them is gone after forward. The store's speed is measured with 16 MiB tensors and
divided by the speed of a raw loop on the same disk, so more is better. [How it works](disk.md)."""
COLUMNS = {
    "peak": "peak",
    "held": "held after forward",
    "gone": "region inputs gone",
    "time over recompute": "time over recompute alone",
    "write_over_raw_1": "write, over 1 raw thread",
    "read_over_raw_1": "read, over 1 raw thread",
    "write_over_raw_4": "write, over 4 raw threads",
    "read_over_raw_4": "read, over 4 raw threads",
}
PLOTS = (Bars(name="disk", title="Peak memory of a training step on the CPU", figure="peak"),)
ON_DISK, STORE = "lowtide recompute+offload(disk)", "the store itself"
RIVALRIES = (
    Rivalry(
        ours=ON_DISK,
        theirs=("torch checkpoint", "torch checkpoint + torch.save hooks"),
        figures=("peak", "held"),
    ),
)
SCRIPT = Path(__file__).parent.parent / "disk.py"


def measure(say: Say) -> Result:
    """With as many tokens as the stored result has: the rows shall be comparable."""
    say("bench/disk.py, in fresh processes", 0, 1)
    tokens = json.loads(path_of("disk").read_text())["tokens"]
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "disk.json")
        command = [sys.executable, "-W", "ignore", str(SCRIPT), "--output", str(output), "--tokens", str(tokens)]
        subprocess.run([*command, "--directory", str(SCRIPT.parent)], check=True, stdout=subprocess.DEVNULL)  # noqa: S603
        return from_text(output.read_text())


def from_text(text: str) -> Result:
    data = json.loads(text)
    rows = {name: _step(figures) for name, figures in data["steps"].items()}
    rows[ON_DISK]["time over recompute"] = _ratio(data["step_ratio"])
    rows[STORE] = {
        name: _ratio(value) for name, value in data["throughput"].items() if name.startswith(("write_", "read_"))
    }
    rows[f"{ON_DISK}+tile"]["gone"] = measured(data["boundary_gone"], "share")
    setting = {"tokens": data["tokens"], "boundary": data["boundary_bytes"]}
    return Result(setting, rows, environment=_environment(data), raw=text)


def _step(figures: dict[str, float]) -> dict[str, Figure]:
    return {
        "peak": measured(figures["peak_bytes"], "bytes"),
        "held": measured(figures["held_bytes"], "bytes"),
    }


def _ratio(value: float) -> Figure:
    return Figure(kind="ratio", value=value)


def _environment(data: dict[str, Any]) -> dict[str, Any]:
    return {name: data[name] for name in ("environment", "load") if name in data}
