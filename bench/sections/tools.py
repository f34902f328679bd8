"""What it costs to ask: an audit in plain training steps, a plan in seconds."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

import lowtide
from bench import models
from bench.figures import Figure, Result, count, seconds
from bench.timing import interleaved

if TYPE_CHECKING:
    from torch import nn

    from bench.section import Say

TITLE = "Audit and plan"
ABOUT = """\
An audit of a Llama ({audited[layers]} layers, {audited[width]} wide, {audited[tokens]} tokens) on the CPU with one
thread, compared with plain training steps of the same model, interleaved over {rounds} rounds, and counted in forward
passes. Each plan is one simulated step, without the cache. Its seconds were measured on the machine named below; its
bytes are exact."""
COLUMNS = {
    "time": "time over a plain step",
    "forwards": "forward passes",
    "seconds": "seconds",
    "peak": "planned peak of the device",
}
PLOTS = ()
RIVALRIES = ()
AUDITED = {"layers": 4, "width": 128, "tokens": 256}
ROUNDS = 5
PLANS: dict[str, dict[str, Any]] = {
    "plan Qwen3-8B, 32k, one policy": {"model": "Qwen3-8B", "tokens": "32k", "policy": "recompute+offload+tile"},
    "plan Llama-3.1-8B, 128k, one policy": {
        "model": "Llama-3.1-8B",
        "tokens": "128k",
        "policy": "recompute+offload+tile",
    },
}


def audit(model: nn.Module, batch: dict[str, torch.Tensor]) -> None:
    lowtide.audit(model, batch, configure=lambda copy: lowtide.apply(copy, "recompute"))


def audit_rows() -> dict[str, dict[str, Figure]]:
    model, batch = models.llama(**AUDITED)
    calls: list[int] = []
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    audit(model, batch)
    forwards = len(calls)

    def step() -> None:
        model.zero_grad()
        model(**batch).loss.backward()

    timed = interleaved({"step": step, "audit": lambda: audit(model, batch)}, against="step", rounds=ROUNDS)
    return {"audit of our recompute": {"time": timed["audit"], "forwards": count(forwards)}}


def planned(settings: dict[str, Any]) -> dict[str, Figure]:
    start = time.perf_counter()
    plan = lowtide.plan(**settings, device="H100", ranks=8, engine="fsdp2", cache=False)
    taken = time.perf_counter() - start
    return {"seconds": seconds(taken), "peak": count(plan.candidates[0].estimate.peak_bytes, "bytes")}


def measure(say: Say) -> Result:
    torch.set_num_threads(1)
    total = 1 + len(PLANS)
    say("audit", 0, total)
    rows = audit_rows()
    for done, (name, settings) in enumerate(PLANS.items(), start=1):
        say(name, done, total)
        rows[name] = planned(settings)
    return Result({"audited": AUDITED, "rounds": ROUNDS}, rows)
