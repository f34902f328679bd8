"""Writes docs/planner.html: the page of `lowtide plan --serve`, with plans that were made before and no server.

    python -m bench.planner_page [MODEL ...]

Each plan is for one GPU with LoRA. The page judges its rows again for other GPUs and other amounts of memory; seconds
are those of the GPU that was planned for.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import lowtide
from lowtide.planning.server import answer_of, planner_page
from lowtide.units import parse_tokens

PAGE = Path(__file__).parent.parent / "docs/planner.html"
MODELS = ("Llama-3.1-8B", "Qwen3-4B", "Qwen3-8B", "Mistral-7B", "Gemma-3-4B")
TOKENS = ("8k", "32k", "128k")
DEVICE = "H100"
POINTS = 120
"""The most points of a timeline."""


def answers(models: tuple[str, ...]) -> list[dict]:
    found = []
    for model, tokens in itertools.product(models, TOKENS):
        print(f"{model} {tokens}", flush=True)
        answer = answer_of(lowtide.plan(model, tokens=tokens, device=DEVICE, lora=16))
        timeline = answer["timeline"]
        answer["timeline"] = [{"bytes": point["bytes"]} for point in timeline[:: max(1, len(timeline) // POINTS)]]
        found.append({**answer, "model": model, "tokens": parse_tokens(tokens)})
    return found


if __name__ == "__main__":
    PAGE.write_text(planner_page(answers(tuple(sys.argv[1:]) or MODELS), device=DEVICE))
