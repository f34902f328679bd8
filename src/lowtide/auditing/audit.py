"""`lowtide.audit`: runs the reference, then each set-up, judges it by every check, and returns the report."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from lowtide.auditing.baseline import against, read_baseline
from lowtide.auditing.case import Case
from lowtide.auditing.checks import ddp, gradients, graph, in_place, lifecycle, memory, outcome, recompute
from lowtide.auditing.grades import Grade, grade_named
from lowtide.auditing.reference import Reference, is_ddp, plain_twin
from lowtide.auditing.report import AuditReport
from lowtide.auditing.result import REFUSAL, RUNS, CheckResult, Verdict
from lowtide.auditing.setups import setups_for
from lowtide.auditing.stacks import find_stacks
from lowtide.auditing.step import Experiment
from lowtide.errors import (
    CacheError,
    CannotAuditError,
    InvalidValueError,
    LowtideError,
    MissingDependencyError,
    NoGradientError,
    NoRegionError,
    NotTokenWiseError,
    OffloadError,
)
from lowtide.modules import unwrap_ddp

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

_logger = logging.getLogger(__name__)

_OF_PLAIN_MODEL: dict[str, Callable[[Reference], CheckResult]] = {"parameters reached": graph.reached}

_OF_SETUP: dict[str, Callable[[Case], CheckResult]] = {
    "recomputed": recompute.recomputed,
    "gradients present": gradients.present,
    "gradient values": gradients.values,
    "experts": gradients.experts,
    "outputs": outcome.outputs,
    "buffers": outcome.buffers,
    "random state": outcome.randomness,
    "memory": memory.memory,
    "offload": memory.offload,
    "DDP readiness": ddp.ready_for_ddp,
    "ranks agree": ddp.ranks_agree,
    "adapters on a frozen base": gradients.frozen_base,
    "idempotent": lifecycle.idempotent,
    "reversible": lifecycle.reversible,
    "copy and pickle": lifecycle.portable,
    "in-place changes": in_place.refused,
}

OF_PLAIN_MODEL = tuple(_OF_PLAIN_MODEL)
"""The names of the checks that are about the model itself, whatever the set-up is."""

CHECKS = (*OF_PLAIN_MODEL, *_OF_SETUP)
"""The names of all checks, in the order of the report."""

REFUSALS = (
    InvalidValueError,
    MissingDependencyError,
    NoRegionError,
    NotTokenWiseError,
    OffloadError,
    CacheError,
)
"""The errors with which Lowtide says that it cannot do what is asked. Any other `LowtideError` is a finding: something
was asked for and is not active."""

_NOT_INSIDE_DDP = ("adapters on a frozen base", "copy and pickle", "in-place changes")
"""Checks that freeze weights, copy the model, or fail on purpose in the middle of a reduction."""


@contextlib.contextmanager
def _warnings_are_not_errors() -> Iterator[None]:
    """Let warnings that are errors, as in strict test suites, be warnings: a set-up that warns has not failed."""
    with warnings.catch_warnings():
        if any(action == "error" for action, *_ in warnings.filters):
            warnings.simplefilter("default")
        yield


@_warnings_are_not_errors()
def audit(
    model: nn.Module,
    batch: Any,
    *,
    configure: Callable[[nn.Module], Any] | None = None,
    reference: nn.Module | Callable[[nn.Module], Any] | None = None,
    loss: Callable[[Any], Tensor] | None = None,
    modes: Sequence[str] | None = None,
    checks: Sequence[str] | None = None,
    offload: bool = False,
    dropout: float | None = None,
    seed: int = 0,
    fail_on: Grade | str = Grade.UNSAFE,
    baseline: str | Path | None = None,
) -> AuditReport:
    """Judge whether checkpointing is active and right, by running training steps on this model and this batch.

    The reference is the plain model: a copy without checkpointing, run twice. It is compared with the model as it is,
    or with a copy that `configure(model)` sets up (if `configure` returns an object with `remove()`, undoing is judged
    too); or, for a transformers model whose flag is off, with its own checkpointing in the given `modes` ("default",
    "reentrant", "non-reentrant").

    `batch` is a mapping of keywords, a tuple of arguments or one tensor. `loss` makes a scalar of the model's outputs;
    without it the model's own loss counts, or all outputs. `reference` is a plain twin, or a function that makes a copy
    plain. `offload=True` says that bytes should leave the device: then it is a failure if none do. `dropout` sets every
    dropout for the audit, so that random states are tested in models that have none. `checks` names the checks to run.

    A failed check has a grade: wrong, no-effect, unsafe or untidy. `report.ok` counts those from `fail_on` on. Failures
    that `baseline`, the JSON of an earlier report, has as well are known and do not count.

    Inside DDP, call it on every rank with the rank's own batch: the reference is then the average over ranks.

    The model's weights, gradients, buffers and modes are left as they were.
    """
    _check_arguments(model, checks)
    threshold = grade_named(fail_on)
    known = None if baseline is None else read_baseline(baseline)
    setups = setups_for(model, configure, modes)
    if is_ddp(model) and any(setup.configure is not None for setup in setups):
        raise CannotAuditError(
            "a model inside DDP is audited as it is: set it up, wrap it in DDP, then audit it on every rank"
        )
    plain = plain_twin(model, reference)
    batch = dict(batch) if isinstance(batch, Mapping) else batch  # tokenizers and processors return mappings, not dicts
    experiment = Experiment(batch, loss, tuple(find_stacks(plain)), seed, dropout)
    expected = _run_reference(plain, experiment, on_all_ranks=is_ddp(model))
    results = [check(expected) for name, check in _OF_PLAIN_MODEL.items() if checks is None or name in checks]
    blocks = {}
    for setup in setups:
        case = Case(setup, model, expected, offload)
        results.extend(_judge(case, checks))
        if case.has_run:
            blocks[setup.name] = _blocks(case)
    report = AuditReport(
        model=type(unwrap_ddp(model)).__name__, checks=results, blocks=blocks, seed=seed, fail_on=threshold
    )
    return report if known is None else against(report, known)


audit.__module__ = "lowtide"


def _check_arguments(model: nn.Module, checks: Sequence[str] | None) -> None:
    if not isinstance(model, nn.Module):
        raise CannotAuditError(f"audit needs a torch.nn.Module, got {type(model).__name__}")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise CannotAuditError(
            f"{type(model).__name__} has no parameter that needs a gradient: there is nothing to judge"
        )
    unknown = [name for name in checks or () if name not in CHECKS]
    if unknown:
        raise CannotAuditError(f"unknown check {unknown[0]!r}: choose from {', '.join(CHECKS)}")


def _run_reference(plain: nn.Module, experiment: Experiment, *, on_all_ranks: bool) -> Reference:
    try:
        return Reference(plain, experiment, on_all_ranks=on_all_ranks)
    except CannotAuditError:
        raise
    except Exception as error:
        raise CannotAuditError(
            f"the plain model fails on this batch: {type(error).__name__}: {error}. The audit needs a training step "
            "that works: does the batch fit the model?"
        ) from error


def _judge(case: Case, wanted: Sequence[str] | None) -> list[CheckResult]:
    """Run the experiment under one set-up, then the wanted checks. A set-up that raises has one result: a failure."""
    try:
        case.run()
    except NoGradientError as error:
        return [_detached(case, error)]
    except CannotAuditError:
        raise
    except REFUSALS as error:
        return [_refused(case, error)]
    except Exception as error:  # noqa: BLE001  whatever the set-up raises is the finding
        return [_raised(case, RUNS, error)]
    names = [name for name in _OF_SETUP if wanted is None or name in wanted]
    return [_check(case, name) for name in names if not (case.is_ddp and name in _NOT_INSIDE_DDP)]


def _check(case: Case, name: str) -> CheckResult:
    """Run one check. If the set-up raises in a run that the check makes, that check fails."""
    try:
        return _OF_SETUP[name](case)
    except NoGradientError as error:
        return _raised(case, name, error)
    except CannotAuditError:
        raise
    except Exception as error:  # noqa: BLE001  whatever the set-up raises is the finding
        return _raised(case, name, error)


def _detached(case: Case, error: NoGradientError) -> CheckResult:
    """Report that the set-up's loss requires no gradient although the plain model's does."""
    return case.result(
        "gradients present",
        Verdict.FAIL,
        "no parameter gets a gradient: the loss no longer requires one",
        remedy="a reentrant checkpoint around everything that has weights detaches the loss: pass use_reentrant=False, "
        "or use lowtide.apply",
        error=f"{type(error).__name__}: {error}",
    )


def _refused(case: Case, error: LowtideError) -> CheckResult:
    """Lowtide says on purpose that it cannot do this, and its message has the remedy."""
    result = _raised(case, RUNS, error)
    return dataclasses.replace(result, evidence={**result.evidence, REFUSAL: str(error)})


def _raised(case: Case, name: str, error: Exception) -> CheckResult:
    _logger.debug("%s: the set-up %s raised", name, case.setup.name, exc_info=error)
    first_line = (str(error).strip().splitlines() or [""])[0][:300]
    advice = "lowtide.apply needs no support in the model's code: try it with configure="
    return case.result(
        name,
        Verdict.FAIL,
        f"the plain model trains, but this set-up raises {type(error).__name__}: {first_line}",
        remedy=None if isinstance(error, LowtideError) else advice,
        escalated=Grade.WRONG,  # whatever the check looks for: a step that does not run is no training
        error=f"{type(error).__name__}: {first_line}",
    )


def _blocks(case: Case) -> list[dict[str, Any]]:
    """Describe every block that ran, for the report's map and memory chart."""
    seen, plain = case.run(), case.plain
    return [
        {
            "name": name,
            "stack": stack.name,
            "forward": seen.forward_calls[name],
            "backward": seen.backward_calls[name],
            "plain_bytes": plain.held_bytes[name],
            "bytes": seen.held_bytes[name],
        }
        for stack in case.experiment.stacks
        for name in stack.blocks
        if plain.forward_calls[name]
    ]
