"""The stage `right`: are the gradients those of the plain model?

The engine matrix audits each family of models under each policy, in bf16, under autocast, with dropout and with LoRA.
Then steps run under stress: streams that are late at random, an allocator full of holes, several threads. Gradients
must be bit-identical where the plain model's own are from run to run; tiles may change them by rounding, within the
audit's tolerances.
"""

from __future__ import annotations

import contextlib
import itertools
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

import lowtide
from lowtide.auditing.result import Verdict
from lowtide.selftest import stress
from lowtide.selftest.models import FAMILIES, build
from lowtide.selftest.record import Row, StageResult, without_paths

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lowtide.auditing import AuditReport
    from lowtide.selftest.bench import Bench

CHECKS = (
    "recomputed",
    "gradients present",
    "gradient values",
    "experts",
    "outputs",
    "buffers",
    "random state",
    "DDP readiness",
)
"""The audit's checks of one step. Those that install a policy again and again belong to an audit of your own model."""

SETTINGS = ("fp32", "bf16", "autocast", "dropout", "lora")

POLICIES = (
    "recompute",
    "recompute+offload",
    "recompute(keep=attention)",
    "recompute+tile(mlp, loss, tokens=32, loss_tokens=32)",
    "recompute+offload+tile(tokens=32, loss_tokens=32)",
)
_OF_A_TOWER = {
    POLICIES[3]: "recompute+tile(mlp, tokens=16)",
    POLICIES[4]: "recompute+offload+tile(mlp, tokens=16)",
}
"""What tiles of a tower that is no model of transformers: its attention and its loss cannot be seen."""


_NOT_FOR_TILES = ("dropout", "autocast")


class Case(NamedTuple):
    """One cell of the engine matrix."""

    family: str
    policy: str
    setting: str


_QUICK = (
    ("llama", 0, "fp32"),
    ("qwen3-vl", 1, "autocast"),
    ("mixtral", 2, "lora"),
    ("vision", 3, "bf16"),
    ("llama", 4, "bf16"),
    ("qwen3-vl", 0, "bf16"),
    ("mixtral", 1, "dropout"),
    ("vision", 2, "dropout"),
    ("llama", 3, "fp32"),
    ("qwen3-vl", 4, "lora"),
)
"""The cells of a quick run: each family, policy and setting at least once."""


def cases(*, quick: bool) -> list[Case]:
    """Return the matrix, or some cells of it for a quick run.

    Two settings are left out for tiles, since they have nothing to be compared with. Tiles draw other numbers for
    dropout than the whole module does. Under autocast, float32 gradients come from sums in bf16, which tiles round
    differently: the tolerance for float32 is too narrow, and routers choose different experts.
    """
    cells = _QUICK if quick else itertools.product(FAMILIES, range(len(POLICIES)), SETTINGS)
    made = [Case(family, _policy_for(family, POLICIES[number]), setting) for family, number, setting in cells]
    return [case for case in made if not (case.setting in _NOT_FOR_TILES and "tile" in case.policy)]


def _policy_for(family: str, policy: str) -> str:
    return _OF_A_TOWER.get(policy, policy) if family == "vision" else policy


def run(bench: Bench) -> StageResult:
    """Judge the engine matrix, then steps under stress."""
    rows = []
    for case in cases(quick=bench.quick):
        bench.show(f"{case.family}, {case.policy}, {case.setting}")
        rows.append(judge(bench, case))
    rows += stress.run(bench)
    return StageResult(name="right", rows=rows)


def judge(bench: Bench, case: Case) -> Row:
    """Audit one cell of the matrix."""
    model, batch = build(case.family, lora=case.setting == "lora")
    dtype = torch.bfloat16 if case.setting == "bf16" else torch.float32
    model = model.to(bench.device, dtype)
    if case.setting != "lora" and hasattr(model, "tie_weights"):
        model.tie_weights()  # type: ignore[operator]  # a move to an out-of-tree device takes tied weights apart
    put = {
        name: tensor.to(bench.device, dtype if tensor.is_floating_point() else None) for name, tensor in batch.items()
    }
    policy = bench.offload(case.policy)

    def configure(model: nn.Module) -> lowtide.Applied:
        return lowtide.apply(model, policy)

    with _autocast(bench, case):
        report = lowtide.audit(
            model,
            put,
            configure=configure,
            checks=CHECKS,
            offload="offload" in case.policy,
            dropout=0.1 if case.setting == "dropout" else None,
        )
    return _row(case, report)


@contextlib.contextmanager
def _autocast(bench: Bench, case: Case) -> Iterator[None]:
    if case.setting != "autocast":
        yield
        return
    with torch.autocast(bench.device.type, torch.bfloat16):
        yield


def _row(case: Case, report: AuditReport) -> Row:
    failed = [f"{check.name}: {check.summary}" for check in report.failures]
    evidence: dict[str, Any] = {} if failed else report["gradient values"].evidence
    identical = evidence.get("identical", False)
    if not failed and not identical and "tile" not in case.policy and evidence.get("rerun_identical"):
        failed = [f"gradients differ by {evidence.get('largest_error', float('nan')):.1e}, where nothing may"]
    unproven = [check.summary for check in report.unproven]
    verdict = Verdict.FAIL if failed else Verdict.INCONCLUSIVE if unproven or not report.ok else Verdict.PASS
    summary = "; ".join(failed or unproven) or ("bit-identical" if identical else report["gradient values"].summary)
    return Row(
        name=f"{case.family}, {case.policy}, {case.setting}",
        verdict=verdict,
        summary=without_paths(summary),
        figures={"identical": identical, "largest_error": evidence.get("largest_error")},
    )
