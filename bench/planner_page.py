"""Writes docs/planner.html: the page of `lowtide plan --serve`, with plans that were made before and no server.

    python -m bench.planner_page [MODEL ...]
    python -m bench.planner_page --again    # the same plans, after a change of the page

Each plan is for one GPU with LoRA. The page judges its rows again for other GPUs and other amounts of memory; seconds
are those of the GPU that was planned for, and the page says so.
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import lowtide
from lowtide.planning.server import answer_of, planner_page
from lowtide.units import parse_tokens

PAGE = Path(__file__).parent.parent / "docs/planner.html"
MODELS = ("Llama-3.1-8B", "Qwen3-8B")
TOKENS = ("8k", "32k")
DEVICE = "H100"
LORA = 16
POINTS = 120
"""The most points of a timeline."""


def answers(models: tuple[str, ...]) -> list[dict[str, Any]]:
    found = []
    for model, tokens in itertools.product(models, TOKENS):
        print(f"{model} {tokens}", flush=True)
        answer = answer_of(lowtide.plan(model, tokens=tokens, device=DEVICE, lora=LORA))
        found.append({**answer, "model": model, "tokens": parse_tokens(tokens), "device": DEVICE})
        found[-1]["timeline"] = thinned(answer["timeline"])
    return found


def thinned(timeline: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the points of a timeline that the page draws, the peak among them."""
    every = max(1, len(timeline) // POINTS)
    peak = max(range(len(timeline)), key=lambda place: sum(timeline[place]["bytes"].values()), default=0)
    places = sorted({*range(0, len(timeline), every), *([peak] if timeline else [])})
    return [{"bytes": timeline[place]["bytes"]} for place in places]


def plans_of(page: str) -> list[dict[str, Any]]:
    """Return the plans that a page holds."""
    plans: list[dict[str, Any]] = json.JSONDecoder().raw_decode(page.partition("const plans = ")[2])[0]
    return plans


def main(arguments: list[str]) -> None:
    plans = plans_of(PAGE.read_text()) if arguments == ["--again"] else answers(tuple(arguments) or MODELS)
    PAGE.write_text(planner_page(plans))


if __name__ == "__main__":
    main(sys.argv[1:])
