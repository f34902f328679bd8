"""`lowtide.audit`: the reference, the set-ups, the checks, the report."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from lowtide.auditing.case import Case
from lowtide.auditing.checks import ddp, gradients, in_place, lifecycle, memory, outcome, recompute
from lowtide.auditing.checks import gradients as frozen
from lowtide.auditing.reference import Reference, is_parallel, reference_of
from lowtide.auditing.report import REFUSAL, RUNS, AuditReport, CheckResult, Verdict
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

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

REFUSALS = (
    InvalidValueError,
    MissingDependencyError,
    NoRegionError,
    NotTokenWiseError,
    OffloadError,
    CacheError,
)
"""What Lowtide says if it cannot do what is asked. That something was asked for and is not active is a finding."""

CHECKS: dict[str, Callable[[Case], CheckResult]] = {
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
    frozen.NAME: frozen.frozen_base,
    "idempotent": lifecycle.idempotent,
    "reversible": lifecycle.reversible,
    "copy and pickle": lifecycle.portable,
    in_place.NAME: in_place.refused,
}
"""By name, in the order of the report."""


@contextlib.contextmanager
def _warnings_are_no_errors() -> Iterator[None]:
    """Where warnings are errors, as in strict test suites, a set-up that warns would look like one that raises."""
    with warnings.catch_warnings():
        if any(action == "error" for action, *_ in warnings.filters):
            warnings.simplefilter("default")
        yield


@_warnings_are_no_errors()
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
) -> AuditReport:
    """Judge whether checkpointing is active and right, by running training steps on this model and this batch.

    The plain model (a copy; twice) is the yardstick. Judged is the model as it is, or as `configure(model)` makes a
    copy of it (an object with `remove()` that it returns is used to undo it); or, for a transformers model whose flag
    is off, its own checkpointing in the given `modes` ("default", "reentrant", "non-reentrant").

    `batch` is a mapping of keywords, a tuple of arguments or one tensor. `loss` makes a scalar of the model's outputs;
    without it their own loss counts, or all outputs. `reference` is a plain twin, or a function that makes a copy so.
    `offload=True` says that bytes should leave the device: then it is a failure if none do. `dropout` sets every
    dropout for the audit, so that random states are tested in models that have none.

    Inside DDP, call it on every rank with the rank's own batch: the yardstick is then the average over ranks.

    The model's weights, gradients, buffers and modes are left as they were.
    """
    _check_input(model, checks)
    setups = setups_for(model, configure, modes)
    if is_parallel(model) and any(setup.configure is not None for setup in setups):
        raise CannotAuditError("a model inside DDP is judged as it is: set it up, wrap it, then audit it on every rank")
    plain = reference_of(model, reference)
    batch = dict(batch) if isinstance(batch, Mapping) else batch  # what tokenizers and processors return is no dict
    experiment = Experiment(batch, loss, tuple(find_stacks(plain)), seed, dropout)
    yardstick = _run_reference(plain, experiment, on_all_ranks=is_parallel(model))
    outcomes: list[CheckResult] = []
    blocks = {}
    for setup in setups:
        case = Case(setup, model, yardstick, offload)
        found = _judge(case, checks)
        outcomes.extend(found)
        if "seen" in vars(case):  # it ran
            blocks[setup.name] = _blocks(case)
    return AuditReport(model=type(model).__name__, checks=outcomes, blocks=blocks, seed=seed)


audit.__module__ = "lowtide"


def _check_input(model: nn.Module, checks: Sequence[str] | None) -> None:
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
    """All checks of one set-up. A set-up that raises fails; a check that raises later fails by itself."""
    try:
        _ = case.run()
    except NoGradientError as error:
        return [_cut_off(case, error)]
    except CannotAuditError:
        raise
    except REFUSALS as error:
        return [_refused(case, error)]
    except Exception as error:  # noqa: BLE001  whatever the set-up raises is the finding
        return [_raised(case, RUNS, error)]
    return [_one(case, name, check) for name, check in CHECKS.items() if _is_wanted(case, name, wanted)]


def _is_wanted(case: Case, name: str, wanted: Sequence[str] | None) -> bool:
    """Not inside DDP: what freezes weights, copies the model or fails on purpose in the middle of a reduction."""
    if case.is_parallel and name in (frozen.NAME, in_place.NAME, "copy and pickle"):
        return False
    return wanted is None or name in wanted


def _one(case: Case, name: str, check: Callable[[Case], CheckResult]) -> CheckResult:
    try:
        return check(case)
    except NoGradientError as error:
        return _raised(case, name, error)
    except CannotAuditError:
        raise
    except Exception as error:  # noqa: BLE001  whatever the set-up raises is the finding
        return _raised(case, name, error)


def _cut_off(case: Case, error: NoGradientError) -> CheckResult:
    """The plain model's loss needs a gradient, this one's does not."""
    return case.check(
        "gradients present",
        Verdict.FAIL,
        "no parameter gets a gradient: the loss does not need one any more",
        remedy="a reentrant checkpoint around everything that has weights cuts the graph off: use_reentrant=False, or "
        "lowtide.apply",
        error=str(error),
    )


def _refused(case: Case, error: LowtideError) -> CheckResult:
    """Lowtide says itself, on purpose, that it cannot do this, and what can be done."""
    check = _raised(case, RUNS, error)
    return dataclasses.replace(check, evidence={**check.evidence, REFUSAL: str(error)})


def _raised(case: Case, name: str, error: Exception) -> CheckResult:
    first = (str(error).strip().splitlines() or [""])[0][:300]
    ours = "lowtide.apply needs no support by the model's code; try it with configure="
    return case.check(
        name,
        Verdict.FAIL,
        f"the plain model trains, this set-up raises {type(error).__name__}: {first}",
        remedy=None if isinstance(error, LowtideError) else ours,
        error=f"{type(error).__name__}: {first}",
    )


def _blocks(case: Case) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "stack": stack.name,
            "forward": case.run().forward_calls[name],
            "backward": case.run().backward_calls[name],
            "plain_bytes": case.plain.held_bytes[name],
            "bytes": case.run().held_bytes[name],
        }
        for stack in case.experiment.stacks
        for name in stack.blocks
        if case.plain.forward_calls[name]
    ]
