"""Writes the drawings of a step's memory in docs/img: `python bench/step_drawings.py` (a minute or two).

Each curve is the timeline of `lowtide.plan`: one training step of a small Llama with LoRA, run through the real engine
on tensors without memory. The samples are kept in docs/img/step_memory.json; the drawings are made of nothing else.
"""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import transformers

import lowtide

IMAGES = Path(__file__).parent.parent / "docs" / "img"
DATA = IMAGES / "step_memory.json"

MODEL = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 16,
    "num_attention_heads": 8,
    "vocab_size": 16000,
}
JOB = {"tokens": 16384, "device": "L40S", "lora": 16}
POLICIES = ("none", "recompute", "recompute+offload", "recompute+offload+tile(tokens=2k)")
DRAWINGS = {"step-none-recompute": POLICIES[:2], "step-recompute-offload-tile": POLICIES[1:]}
"""Each drawing has one scale for all of its panels."""

SERIES = {
    "model": ("weights", "gradients", "optimizer", "batch"),
    "logits": ("logits",),
    "activations": ("activations", "workspace", "communication"),
}
LABELS = {"model": "weights, optimizer", "logits": "logits", "activations": "activations"}
GIB = 2**30


def main() -> None:
    DATA.write_text(as_lines([measured(policy) for policy in POLICIES]))
    for name, drawing in drawings(json.loads(DATA.read_text())).items():
        (IMAGES / name).write_text(drawing)


def measured(policy: str) -> dict[str, Any]:
    """One policy's step: its peak, and samples of `[milliseconds, phase, bytes of each series]`."""
    plan = lowtide.plan(transformers.LlamaConfig(**MODEL), policy=policy, cache=False, **JOB)
    samples = [[round(s["seconds"] * 1e3, 2), s["phase"], *in_series(s["bytes"])] for s in plan.timeline]
    return {"policy": policy, "peak_bytes": plan.peak_bytes, "host_bytes": plan.host_bytes, "samples": samples}


def in_series(by_kind: dict[str, int]) -> list[int]:
    unknown = by_kind.keys() - set(itertools.chain(*SERIES.values()))
    if unknown:
        raise ValueError(f"no series shows {', '.join(sorted(unknown))}: add them to SERIES")
    return [sum(by_kind.get(kind, 0) for kind in kinds) for kinds in SERIES.values()]


def as_lines(steps: list[dict[str, Any]]) -> str:
    """JSON with one sample in a line."""
    return (
        json.dumps(steps, separators=(",", ":")).replace('"samples":[', '"samples":[\n').replace("],[", "],\n[") + "\n"
    )


def drawings(steps: list[dict[str, Any]]) -> dict[str, str]:
    """The content of each drawing, by file name."""
    by_policy = {step["policy"]: step for step in steps}
    return {f"{name}.svg": drawing([by_policy[policy] for policy in shown]) for name, shown in DRAWINGS.items()}


WIDTH, LEFT, RIGHT = 560, 58, 14
TOP, PANEL, GAP = 40, 130, 58
STYLE = """
  text { font: 13px system-ui, sans-serif; fill: #24292f }
  .title { font-weight: 600 } .faint { fill: #57606a } .paper { fill: #ffffff; stroke: #d0d7de }
  .grid { stroke: #d0d7de } .phase { stroke: #57606a; stroke-dasharray: 3 3 } .peak { fill: #24292f }
  .model { fill: #8c959f } .logits { fill: #e08a00 } .activations { fill: #0a8a8a }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 }
    .faint { fill: #a0a9b3 } .paper { fill: #161b22; stroke: #3d444d }
    .grid { stroke: #3d444d } .phase { stroke: #a0a9b3 } .peak { fill: #e6edf3 }
    .model { fill: #6e7681 } .logits { fill: #d99021 } .activations { fill: #2bb3b0 }
  }"""


class Frame(NamedTuple):
    """Where a panel's milliseconds and bytes are on the paper."""

    top: float
    milliseconds: float
    most: float
    """Bytes at the upper edge."""

    @property
    def bottom(self) -> float:
        return self.top + PANEL

    def x(self, milliseconds: float) -> float:
        return round(LEFT + (WIDTH - LEFT - RIGHT) * milliseconds / self.milliseconds, 1)

    def y(self, nbytes: float) -> float:
        return round(self.bottom - PANEL * nbytes / self.most, 1)


def drawing(steps: list[dict[str, Any]]) -> str:
    height = TOP + len(steps) * (PANEL + GAP)
    most, tick = scale(max(step["peak_bytes"] for step in steps))
    time = max(step["samples"][-1][0] for step in steps)
    frames = [Frame(TOP + 24 + place * (PANEL + GAP), time, most) for place in range(len(steps))]
    body = itertools.chain.from_iterable(panel(step, frame, tick) for step, frame in zip(steps, frames, strict=True))
    described = "; ".join(f"{step['policy']}: peak {gib(step['peak_bytes'])}" for step in steps)
    size = f'width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">',
            f"<title>Device memory over one training step. {described}</title>",
            f"<style>{STYLE}\n</style>",
            f'<rect class="paper" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="8"/>',
            *legend(),
            *body,
            "</svg>\n",
        ]
    )


def scale(peak: int) -> tuple[float, float]:
    """The upper edge and the distance of grid lines, in bytes: steps of 1, 2 or 5, four to eight of them."""
    size = 10 ** math.floor(math.log10(peak / GIB / 4))
    tick = next(size * step for step in (1, 2, 5, 10) if peak / GIB / (size * step) <= 5)  # noqa: PLR2004
    return math.ceil(peak * 1.05 / GIB / tick) * tick * GIB, tick * GIB


def gib(nbytes: float) -> str:
    return f"{nbytes / GIB:.3g} GiB"


def legend() -> list[str]:
    lines, x = [], LEFT
    for name, label in LABELS.items():
        lines.append(f'<rect class="{name}" x="{x}" y="16" width="12" height="12" rx="2"/>')
        lines.append(f'<text x="{x + 18}" y="27">{label}</text>')
        x += 42 + 7 * len(label)
    return lines


def panel(step: dict[str, Any], frame: Frame, tick: float) -> list[str]:
    """One policy: title, grid, stacked areas, phases and the peak."""
    samples = step["samples"]
    highest = max(samples, key=lambda sample: sum(sample[2:]))
    peak_x, peak_y = frame.x(highest[0]), frame.y(step["peak_bytes"])
    host = f", host {gib(step['host_bytes'])}" if step["host_bytes"] else ""
    return [
        f'<text class="title" x="{LEFT}" y="{frame.top - 8}">{step["policy"]}</text>',
        (
            f'<text class="faint" x="{WIDTH - RIGHT}" y="{frame.top - 8}" text-anchor="end">'
            f"peak {gib(step['peak_bytes'])}{host}</text>"
        ),
        *grid(frame, tick),
        *areas(samples, frame),
        *phases(samples, frame),
        f'<circle class="peak" cx="{peak_x}" cy="{peak_y}" r="3"/>',
    ]


def grid(frame: Frame, tick: float) -> list[str]:
    lines = []
    for number in range(round(frame.most / tick) + 1):
        y = frame.y(number * tick)
        lines.append(f'<line class="grid" x1="{LEFT}" y1="{y}" x2="{WIDTH - RIGHT}" y2="{y}"/>')
        lines.append(f'<text class="faint" x="{LEFT - 6}" y="{y + 4}" text-anchor="end">{gib(number * tick)}</text>')
    return lines


def areas(samples: list[list[Any]], frame: Frame) -> list[str]:
    """The series on top of each other, as steps: a sample holds until the next."""
    below = [0] * len(samples)
    lines = []
    for place, name in enumerate(SERIES):
        above = [base + sample[2 + place] for base, sample in zip(below, samples, strict=True)]
        edge = [(frame.x(sample[0]), frame.y(height)) for sample, height in zip(samples, above, strict=True)]
        floor = [(frame.x(sample[0]), frame.y(height)) for sample, height in zip(samples, below, strict=True)]
        lines.append(f'<path class="{name}" d="{stairs(edge, "M")} {stairs(floor, "L", backwards=True)} Z"/>')
        below = above
    return lines


def stairs(points: list[tuple[float, float]], start: str, *, backwards: bool = False) -> str:
    """A path that keeps each height until the next point."""
    ordered = points[::-1] if backwards else points
    steps = [f"V{y:g}H{x:g}" if backwards else f"H{x:g}V{y:g}" for x, y in ordered[1:]]
    return f"{start}{ordered[0][0]:g},{ordered[0][1]:g}" + "".join(steps)


def phases(samples: list[list[Any]], frame: Frame) -> list[str]:
    """A line where a phase begins, and its name below, where there is room."""
    lines = []
    spans = [(name, [s[0] for s in group]) for name, group in itertools.groupby(samples, key=lambda sample: sample[1])]
    for number, (name, times) in enumerate(spans):
        end = spans[number + 1][1][0] if number + 1 < len(spans) else times[-1]
        left, right = frame.x(times[0]), frame.x(end)
        if number:
            lines.append(f'<line class="phase" x1="{left}" y1="{frame.top}" x2="{left}" y2="{frame.bottom + 16}"/>')
        if right - left > 7 * len(name):
            lines.append(f'<text class="faint" x="{left + 4}" y="{frame.bottom + 16}">{name}</text>')
    return lines


if __name__ == "__main__":
    main()
