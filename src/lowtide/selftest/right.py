"""The stage `right`: are the gradients those of the plain model?

The engine matrix audits each family of models under each policy, in bf16, under autocast, with dropout and with LoRA.
Then steps run under stress: streams that are late at random, an allocator full of holes, several threads. Gradients
must be bit-identical where the plain model's own are from run to run (`noise.py`); tiles may change them by rounding,
within the audit's tolerances.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

import lowtide
from lowtide.auditing.reference import deep_copy
from lowtide.auditing.result import Verdict
from lowtide.auditing.step import Experiment, gradients_with
from lowtide.selftest import stress
from lowtide.selftest.findings import Findings
from lowtide.selftest.models import FAMILIES, build
from lowtide.selftest.noise import OWN_NOISE, Judgement, PlainRuns
from lowtide.selftest.record import Row, StageResult, without_paths
from lowtide.selftest.thresholds import THRESHOLDS
from lowtide.targets.job import DTYPES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lowtide.auditing import AuditReport
    from lowtide.auditing.comparison import Gradients
    from lowtide.auditing.result import CheckResult
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

SETTINGS = ("fp32", "half", "autocast", "dropout", "lora")
"""How the models are trained. `half` is bf16, or fp16 on a device without it."""

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
    ("vision", 3, "half"),
    ("llama", 4, "half"),
    ("qwen3-vl", 0, "half"),
    ("mixtral", 1, "dropout"),
    ("vision", 2, "dropout"),
    ("llama", 3, "fp32"),
    ("qwen3-vl", 4, "lora"),
)
"""The cells of a quick run, with which a full one begins: each family, policy and setting at least once."""

_FRESH_RUNS = 3
"""How often an engine runs again whose gradients are not the plain model's."""


def cases(*, quick: bool) -> list[Case]:
    """Return the matrix, or some cells of it for a quick run. If time is short, those that cover most have run.

    Two settings are left out for tiles, since they have nothing to be compared with. Tiles draw other numbers for
    dropout than the whole module does. Under autocast, float32 gradients come from sums in bf16, which tiles round
    differently: the tolerance for float32 is too narrow, and routers choose different experts.
    """
    matrix = () if quick else itertools.product(FAMILIES, range(len(POLICIES)), SETTINGS)
    cells = dict.fromkeys([*_QUICK, *matrix])
    made = [Case(family, _policy_for(family, POLICIES[number]), setting) for family, number, setting in cells]
    return [case for case in made if not (case.setting in _NOT_FOR_TILES and "tile" in case.policy)]


def _policy_for(family: str, policy: str) -> str:
    return _OF_A_TOWER.get(policy, policy) if family == "vision" else policy


def run(bench: Bench) -> StageResult:
    """Judge the engine matrix, then steps under stress."""
    found = Findings(bench=bench)
    for case in cases(quick=bench.quick):
        name = _name(bench, case)
        bench.show(name)
        found.add(name, judge, bench, case)
    stress.run(bench, found)
    return found.stage("right")


def _name(bench: Bench, case: Case) -> str:
    return f"{case.family}, {case.policy}, {bench.half if case.setting == 'half' else case.setting}"


def judge(bench: Bench, case: Case) -> Row:
    """Audit one cell of the matrix."""
    model, batch = build(case.family, lora=case.setting == "lora")
    dtype = DTYPES[bench.half] if case.setting == "half" else torch.float32
    model = model.to(bench.device, dtype)
    if case.setting != "lora" and hasattr(model, "tie_weights"):
        model.tie_weights()  # type: ignore[operator]  # a move to an out-of-tree device takes tied weights apart
    put = {
        name: tensor.to(bench.device, dtype if tensor.is_floating_point() else None) for name, tensor in batch.items()
    }
    policy = bench.offload(case.policy)
    dropout = 0.1 if case.setting == "dropout" else None

    def configure(model: nn.Module) -> lowtide.Applied:
        return lowtide.apply(model, policy)

    with _autocast(bench, case):
        report = lowtide.audit(
            model, put, configure=configure, checks=CHECKS, offload="offload" in case.policy, dropout=dropout
        )
        judged = _judged(case, report)
        if judged.verdict is Verdict.FAIL and _may_be_noise(report):
            again = Again(model=model, policy=policy, experiment=Experiment(put, None, (), seed=0, dropout=dropout))
            judged = again.judge(case, report["gradient values"], judged)
    return Row(
        name=_name(bench, case),
        verdict=judged.verdict,
        summary=without_paths(judged.summary),
        figures={
            "identical": judged.identical,
            "largest_error": None if math.isnan(judged.largest_error) else judged.largest_error,
            "own_noise": judged.summary.endswith(OWN_NOISE),
        },
    )


@contextlib.contextmanager
def _autocast(bench: Bench, case: Case) -> Iterator[None]:
    if case.setting != "autocast":
        yield
        return
    with torch.autocast(bench.device.type, DTYPES[bench.half]):
        yield


def _judged(case: Case, report: AuditReport) -> Judgement:
    """Judge the audit's report, in which gradients must be identical unless there are tiles."""
    failed = [f"{check.name}: {check.summary}" for check in report.failures]
    evidence: dict[str, Any] = {} if failed else report["gradient values"].evidence
    identical, largest = evidence.get("identical", False), evidence.get("largest_error", math.nan)
    unproven = [check.summary for check in report.unproven]
    if not failed and not unproven and not identical and "tile" not in case.policy:
        failed = [f"gradients differ by {largest:.1e}, where nothing may"]
    verdict = Verdict.FAIL if failed else Verdict.INCONCLUSIVE if unproven or not report.ok else Verdict.PASS
    summary = "; ".join(failed or unproven) or ("bit-identical" if identical else report["gradient values"].summary)
    return Judgement(verdict=verdict, summary=summary, identical=identical, largest_error=largest)


def _may_be_noise(report: AuditReport) -> bool:
    """Return whether nothing but the values of gradients speaks against the engine."""
    return {check.name for check in report.failures} <= {"gradient values"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Again:
    """A cell of the matrix that runs again, because its gradients differ where nothing may."""

    model: nn.Module
    policy: str
    experiment: Experiment

    def judge(self, case: Case, audited: CheckResult, judged: Judgement) -> Judgement:
        """Return the worst that fresh runs show, if the plain model's noise explains what the audit saw; else that."""
        plain = PlainRuns(lambda: self._gradients(deep_copy(self.model)))
        if not self._explains(plain, audited):
            return judged
        rounds = "tile" in case.policy
        fresh = [plain.judge(self._engine_gradients(), rounds=rounds) for _ in range(_FRESH_RUNS)]
        order = (Verdict.FAIL, Verdict.INCONCLUSIVE, Verdict.PASS)
        worst = min(fresh, key=lambda found: order.index(found.verdict))
        if worst.verdict is not Verdict.PASS:
            return worst
        largest = max(judged.largest_error, *(found.largest_error for found in fresh))
        return dataclasses.replace(
            worst, summary=f"equal within {largest:.1e}, {OWN_NOISE}", identical=False, largest_error=largest
        )

    @staticmethod
    def _explains(plain: PlainRuns, audited: CheckResult) -> bool:
        """Return whether the plain model by itself differs in the gradients that the audit names, and as much."""
        different = audited.evidence.get("different")
        if different is None:
            largest = audited.evidence["largest_error"]
            plain.unexplained(dict.fromkeys(audited.evidence["noise"], largest))  # as many reruns as it takes
            named = all(plain.errors.get(name, 0.0) > 0 for name in audited.evidence["noise"])
            return named and largest <= THRESHOLDS.own_noise * max(plain.errors.values(), default=0.0)
        return len(different) == audited.evidence["count"] and not plain.unexplained(different)

    def _gradients(self, model: nn.Module) -> Gradients:
        return gradients_with(model, self.experiment, lambda: None)

    def _engine_gradients(self) -> Gradients:
        model = deep_copy(self.model)
        with lowtide.apply(model, self.policy):
            return self._gradients(model)
