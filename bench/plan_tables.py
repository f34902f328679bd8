"""Write docs/plan_tables.md: plans of models that have published figures. Run `python -m bench.plan_tables`.

Everything in the tables comes from `lowtide.plan`; the published figures are shown beside it, and no plan uses them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

import lowtide
from bench import longest_sequences
from lowtide.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from lowtide import Plan

DOCS = Path(__file__).parent.parent / "docs"
DATA = DOCS / "plans.json"

CASES: list[dict[str, Any]] = [
    {"model": "Qwen3-VL-4B", "tokens": tokens, "device": "L40S", "ranks": 8, "lora": 16, "lora_dtype": "bf16"}
    for tokens in ("32k", "64k", "128k")
] + [
    {"model": "Qwen3-8B", "tokens": "128k", "device": "H100", "ranks": 8, "engine": "fsdp2"},
    {"model": "Llama-3.1-8B", "tokens": "128k", "device": "H100", "ranks": 8, "engine": "fsdp2"},
]

PUBLISHED = {
    ("Qwen3-VL-4B", "32k"): (24.8, 69),
    ("Qwen3-VL-4B", "64k"): (33.8, 171),
    ("Qwen3-VL-4B", "128k"): (31.0, 300),
}
"""unslothai/unsloth, pull request 4077: Qwen3-VL-4B with LoRA on 8 L40S, recompute with offload to the host.

GiB of device memory, and seconds of a step."""

INTRODUCTION = """\
# Plans of known models

Each row is one training step, simulated on a machine without a GPU. `bench/plan_tables.py` writes this page. Device
figures are what one rank needs, including 0.5 GiB for the driver's context and 0.4 GiB for NCCL.
Seconds come from data sheets and typical efficiencies: we claim only the order of the rows.
[The planner](planner.html) is a page with more plans, to be tried with other GPUs and less memory.

## Beside published figures

[unslothai/unsloth, pull request 4077](https://github.com/unslothai/unsloth/pull/4077)
(4240 has replaced it since) reports Qwen3-VL-4B with LoRA on eight L40S under DDP, with recompute, offload to the host,
and tiled MLPs.

| tokens | published | planned: recompute+offload+tile(loss) | planned: recompute+offload+tile |
|---|---|---|---|
"""
_PLANNED = ("recompute+offload+tile(loss)", "recompute+offload+tile")

DIFFERENCES = """
Nothing was tuned to come closer. The report does not say which modules have adapters, of what rank, or how many images
are in a batch; these plans have rank 16 on the language model's seven projections, in bf16, and no images. The report
uses unsloth's fused loss; the plans use a tiled loss. The report's seconds cover a whole training loop on eight GPUs
that share PCIe; the planned seconds cover only the kernels, on a roofline. The reported run at 64K holds more memory
than the run at 128K, as it would if it tiled MLPs only at 128K. A fair test needs a run whose settings are known: if
you have one, please send it.
"""


def main() -> None:
    console = Console()
    plans = []
    for case in CASES:
        with console.status(f"{case['model']} {case['tokens']}"):
            settings = {name: value for name, value in case.items() if name != "model"}
            plans.append(lowtide.plan(case["model"], **settings))
        console.print(
            f"{case['model']} {case['tokens']}: {plans[-1].best.policy if plans[-1].best else 'nothing fits'}"
        )
    DATA.write_text(json.dumps([row(case, plan) for case, plan in zip(CASES, plans, strict=True)], indent=1))
    longest = json.loads(longest_sequences.DATA.read_text())
    (DOCS / "plan_tables.md").write_text(page(json.loads(DATA.read_text()), longest))


def row(case: dict[str, Any], plan: Plan) -> dict[str, Any]:
    """Return the figures of a plan that the page shows."""
    return {
        "case": case,
        "budget": plan.budget,
        "best": plan.best.policy if plan.best else None,
        "recommended": [{"why": why, "policy": candidate.policy} for why, candidate in plan.recommended],
        "why_not_faster": plan.why_not_faster,
        "candidates": [
            {
                "policy": candidate.policy,
                "fits": candidate.fits,
                "device_bytes": candidate.device_bytes,
                "peak_bytes": candidate.estimate.peak_bytes,
                "host_bytes": candidate.estimate.host_bytes,
                "seconds": candidate.estimate.seconds,
                "limit": candidate.limit,
            }
            for candidate in plan.candidates
        ],
    }


def page(rows: list[dict[str, Any]], longest: list[dict[str, Any]]) -> str:
    compared = "\n".join(line for data in rows if (line := beside(data)))
    parts = [INTRODUCTION, compared, "\n", DIFFERENCES, longest_sequences.section(longest)]
    return "".join([*parts, *(section(data) for data in rows)])


def beside(data: dict[str, Any]) -> str | None:
    published = PUBLISHED.get((data["case"]["model"], data["case"]["tokens"]))
    if published is None:
        return None
    figures = {candidate["policy"]: candidate for candidate in data["candidates"]}
    memory, seconds = published
    cells = []
    for planned in (figures[policy] for policy in _PLANNED):
        off = planned["device_bytes"] / (memory * 2**30) - 1
        cells.append(f"{format_bytes(planned['device_bytes'])} ({off:+.0%}), {planned['seconds']:.0f} s")
    return f"| {data['case']['tokens']} | {memory} GiB, {seconds} s | {' | '.join(cells)} |"


def _sentence(words: str) -> str:
    return words[0].upper() + words[1:]


def section(data: dict[str, Any]) -> str:
    case = data["case"]
    trained = f"LoRA {case['lora']}" if "lora" in case else "full fine-tuning"
    lines = [
        "",
        f"## {case['model']}, {case['tokens']} tokens, {trained}",
        "",
        f"{case['ranks']} x {case['device']}, {case.get('engine', 'ddp')}, {format_bytes(data['budget'])} each.",
        "",
        "| policy | fits | device | host | step | what holds the memory |",
        "|---|---|---|---|---|---|",
        *(
            f"| `{c['policy']}` | {'yes' if c['fits'] else 'no'} | {format_bytes(c['device_bytes'])} | "
            f"{format_bytes(c['host_bytes']) if c['host_bytes'] else ''} | {format_seconds(c['seconds'])} | "
            f"{c['limit']} |"
            for c in data["candidates"]
        ),
        "",
        *(f"- {_sentence(one['why'])}: `{one['policy']}`." for one in data["recommended"]),
        *([] if data["recommended"] else ["Nothing fits."]),
    ]
    if data["why_not_faster"]:
        lines.append(f"- Why nothing faster: {data['why_not_faster']}.")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
