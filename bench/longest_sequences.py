"""Find the longest sequences that docs/plan_tables.md shows. Run `python -m bench.longest_sequences`.

Every figure of ours is `lowtide plan … --headroom 0 --longest --policy …`; the published ones are shown beside it, and
nothing uses them. A search simulates every layer of the step that it ends with: the rows take some minutes each, unless
the plans' cache has them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console

from lowtide.hardware.accelerators import resolve_accelerator
from lowtide.planning.max_fit import find_max
from lowtide.targets.job import make_job
from lowtide.units import parse_bytes

DATA = Path(__file__).parent.parent / "docs/longest.json"

POLICIES = ("recompute+offload+tile(mlp, loss)", "recompute+offload+tile")
"""With MLPs and the loss in tiles; and with attention, too."""

HOST = "250GiB"
"""Host memory of a rank: an eighth of a node's 2 TB. One with a consumer GPU needs as much for these lengths."""

_QLORA: dict[str, Any] = {"lora": 32, "base": "4bit", "lora_dtype": "bf16"}

CASES: list[dict[str, Any]] = [
    {"model": "Qwen3-8B", "device": "RTX 4090", "lora": 16, "lora_dtype": "bf16"},
    {"model": "Qwen3-8B", "device": "H100", "lora": 16, "lora_dtype": "bf16"},
    {"model": "Llama-3.1-8B", "device": "H100", "ranks": 8, "engine": "fsdp2"},
    {"model": "Llama-3.1-8B", "device": "RTX 4090", **_QLORA},
    {"model": "Llama-3.1-8B", "device": "L40S", **_QLORA},
    {"model": "Llama-3.1-8B", "device": "H100", **_QLORA},
]

_UNSLOTH = "[Unsloth](https://docs.unsloth.ai/basics/unsloth-benchmarks)"

PUBLISHED = {
    ("Llama-3.1-8B", "RTX 4090", "4bit"): f"{_UNSLOTH}, 24 GB: 78,475",
    ("Llama-3.1-8B", "L40S", "4bit"): f"{_UNSLOTH}, 48 GB: 191,728",
    ("Llama-3.1-8B", "H100", "4bit"): f"{_UNSLOTH}, 80 GB: 342,733",
}
"""Published for the same model, rank and 4-bit base, on a GPU of the same size."""

INTRODUCTION = f"""
## The longest sequence that fits

Found by `lowtide plan … --host-budget {HOST} --headroom 0 --longest`, for one sequence on each rank: with MLPs and the
loss in tiles, and with attention in tiles, too. `bench/longest_sequences.py` writes the figures.

| model | GPU | `{POLICIES[0]}` | `{POLICIES[1]}` | | a step | published |
|---|---|---|---|---|---|---|
"""

OTHERS = r"""
Other published lengths are of other set-ups; beside each is the nearest that the planner can express:

- [ALST](https://arxiv.org/abs/2506.13996) trains Llama-3.1-8B on 500K tokens with one H100, and 3.7M with eight, whose
  sequence parallelism divides a sequence by eight: 462K tokens for each GPU. It offloads the optimizer's states, and
  with one GPU the weights; the plans above keep both on the devices.
- [TRL](https://huggingface.co/docs/trl/en/long_context_training) trains Qwen3-8B on 1,048,576 tokens with eight H100
  and context parallelism, 128K for each GPU, in 56.2 GB each. The plan of
  [Qwen3-8B at 128K tokens on eight H100](#qwen3-8b-128k-tokens-full-fine-tuning) below has as many tokens for each GPU,
  but attends to those only: its bytes can be compared, and its seconds cannot.
- [Unsloth](https://docs.unsloth.ai/new/500k-context-length-fine-tuning) trains gpt-oss-20b with a 4-bit base on 290K
  tokens with one H100, and on more than 500K with tiled MLPs.
- axolotl documents [ALST's tiles](https://github.com/axolotl-ai-cloud/axolotl/tree/main/examples/alst) and sequence
  parallelism; we found no longest sequence that it publishes.

\* as long as the host's memory allows: on the device there is still room.

None of our lengths was run: no GPU was at hand.
"""


def main() -> None:
    console = Console()
    found = []
    for case in CASES:
        settings = {"images": None, "engine": None, "ranks": 1, **case}
        del settings["model"], settings["device"]
        accelerator = resolve_accelerator(case["device"], None)
        with console.status(f"{case['model']} on {case['device']}"):
            rows = find_max(
                case["model"],
                make_job(tokens="8k", **settings),
                accelerator,
                host_budget=HOST,
                policies=POLICIES,
            )
        found.append({"case": case, "rows": [_figures(row) for row in rows]})
        console.print(f"{case['model']} on {case['device']}: {[row.most for row in rows]}")
        DATA.write_text(json.dumps(found, indent=1) + "\n")


def _figures(row: Any) -> dict[str, Any]:
    return {
        "policy": row.policy,
        "tokens": row.most,
        "device_bytes": row.device_bytes,
        "host_bytes": row.estimate.host_bytes,
        "seconds": row.estimate.seconds,
    }


def section(found: list[dict[str, Any]]) -> str:
    """Return the page's section about longest sequences."""
    return INTRODUCTION + "".join(_line(data) for data in found) + OTHERS


def _line(data: dict[str, Any]) -> str:
    case, (without, tiled) = data["case"], data["rows"]
    trained = f"LoRA {case['lora']}" if "lora" in case else "full fine-tuning"
    trained += ", 4-bit base" if "base" in case else ""
    gpus = f"{case['ranks']} x {case['device']}, {case['engine']}" if "ranks" in case else case["device"]
    mark = "*" if tiled["host_bytes"] > 0.99 * parse_bytes(HOST) else ""
    published = PUBLISHED.get((case["model"], case["device"], case.get("base", "")), "")
    return (
        f"| {case['model']}, {trained} | {gpus} | {without['tokens']:,} | {tiled['tokens']:,}{mark} | "
        f"{tiled['tokens'] / without['tokens']:.2f} x | {tiled['seconds']:,.0f} s | {published} |\n"
    )


if __name__ == "__main__":
    main()
