"""The survey of one architecture: found, built, audited; and audited again where something failed.

False alarms cost more than a missed fault, so a failed check counts only if it fails again with other weights and
another batch.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import importlib.metadata
import time
from typing import TYPE_CHECKING, Any

import lowtide
from lowtide import zoo
from lowtide.auditing import CHECKS, AuditReport, CannotAuditError, Check, Verdict, audit
from lowtide.auditing.objective import objective
from lowtide.auditing.setups import MODES
from lowtide.errors import CacheError, LogitsNotComputedError, NoRegionError, NotTokenWiseError, SilentNoOpError
from lowtide.survey.records import Record, command_for

if TYPE_CHECKING:
    from torch import nn

DROPOUT = 0.1
POLICIES = ("recompute",)
TILED = (
    "recompute+tile(tokens=8, loss_tokens=8)",
    "recompute+tile(mlp, tokens=8)",
    "recompute+tile(loss, loss_tokens=8)",
)
"""Of these, the first that is not refused: not every model has a head, or an MLP of its own. Tiles are small, because
batches are."""

REFUSALS = (NoRegionError, NotTokenWiseError, LogitsNotComputedError, SilentNoOpError, CacheError)
"""What Lowtide says before the first step is over, if a model cannot be run so."""


class Engine(enum.StrEnum):
    TRANSFORMERS = "transformers"
    """The model's own flag, in both of its modes."""
    LOWTIDE = "lowtide"
    """`lowtide.apply`, with recomputation and with tiles."""


def survey_one(model_type: str, engine: Engine) -> Record:
    started = time.monotonic()
    record = Record(
        model_type=model_type,
        engine=engine.value,
        status="audited",
        versions={name: importlib.metadata.version(name) for name in ("torch", "transformers", "lowtide")},
        command=command_for(model_type, engine.value),
    )
    try:
        specimen = zoo.find(model_type)
        record.model_class = specimen.model_class
        _survey(record, specimen, engine)
    except zoo.CannotBuildError as error:
        record.status, record.why = "not built", "; ".join(list(dict.fromkeys(error.reasons))[:3])
    except CannotAuditError as error:
        record.status, record.why = "failed to run", str(error)
    record.seconds = round(time.monotonic() - started, 2)
    return record


def _survey(record: Record, specimen: zoo.Specimen, engine: Engine) -> None:
    model = specimen.build(0)
    if engine is Engine.TRANSFORMERS and not getattr(model, "supports_gradient_checkpointing", False):
        record.status, record.why = "no checkpointing", f"{specimen.model_class} does not support it"
        return
    accepted, refusals = _policies(model, specimen.batch(0)) if engine is Engine.LOWTIDE else ([], {})
    if refusals and not accepted:
        record.status, record.why = "refused", "; ".join(refusals.values())
        return
    reports = audit_specimen(specimen, engine, accepted, seed=0)
    record.stacks = _stacks(reports[0])
    record.verdicts = {
        check.mode: {c.name: c.verdict.value for c in report.checks if c.mode == check.mode}
        for report in reports
        for check in report.checks
    }
    if refusals:
        record.why = "; ".join(f"{policy} is refused: {why}" for policy, why in refusals.items())
    if any(report.failures for report in reports):
        names = {check.name for report in reports for check in report.failures if check.name in CHECKS}
        _confirm(record, reports, _again(record, specimen, engine, accepted, sorted(names)))


def _again(
    record: Record, specimen: zoo.Specimen, engine: Engine, policies: list[str], checks: list[str]
) -> list[AuditReport]:
    """With other weights and another batch. If that cannot be run, what failed is unconfirmed, and not forgotten."""
    try:
        return audit_specimen(specimen, engine, policies, seed=1, checks=checks)
    except Exception as error:  # noqa: BLE001  whatever it was, the first audit stands
        why = f"what failed could not be confirmed: {type(error).__name__}: {error}"
        record.why = f"{record.why}; {why}" if record.why else why
        return []


def audit_specimen(
    specimen: zoo.Specimen, engine: Engine, policies: list[str], *, seed: int, checks: list[str] | None = None
) -> list[AuditReport]:
    """One report for transformers' own modes, or one per policy."""
    model, batch = specimen.build(seed), specimen.batch(seed)
    if engine is Engine.TRANSFORMERS:
        return [audit(model, batch, modes=MODES, checks=checks, dropout=DROPOUT, seed=seed)]
    return [_audit_policy(model, batch, policy, seed, checks) for policy in policies]


def dropout_under(policy: lowtide.Policy) -> float:
    """A tile draws masks of its own, which are others than those of the whole: tiles are judged without."""
    return 0.0 if any(part.tile for part in (policy, *(rule for _, rule in policy.overrides))) else DROPOUT


def _audit_policy(
    model: nn.Module, batch: dict[str, Any], policy: str, seed: int, checks: list[str] | None
) -> AuditReport:
    def configure(model: nn.Module) -> lowtide.Applied:
        return lowtide.apply(model, policy)

    dropout = dropout_under(lowtide.Policy.parse(policy))
    report = audit(model, batch, configure=configure, checks=checks, dropout=dropout, seed=seed)
    return dataclasses.replace(
        report,
        checks=[dataclasses.replace(check, mode=policy) for check in _comparable(policy, report.checks)],
        blocks=dict(zip([policy], report.blocks.values(), strict=False)),  # none, if it did not run
    )


_VALUES = {"gradients present", "gradient values", "experts", "outputs"}


def _comparable(policy: str, checks: list[Check]) -> list[Check]:
    """Nor are values judged where a model draws by itself in what is tiled, as PhiMoE's router does."""
    if "tile" not in policy or not any(check.evidence.get("other_draws_in_forward") for check in checks):
        return checks
    return [
        dataclasses.replace(
            check, verdict=Verdict.INCONCLUSIVE, summary=f"{check.summary}; but tiles draw random numbers of their own"
        )
        if check.name in _VALUES and check.verdict is Verdict.FAIL
        else check
        for check in checks
    ]


def _policies(model: nn.Module, batch: dict[str, Any]) -> tuple[list[str], dict[str, str]]:
    """The policies to audit, and those that Lowtide refuses for this model, with its words: in a whole step, because
    the guard speaks at the end of backward."""
    refused: dict[str, str] = {}

    def accepts(policy: str) -> bool:
        try:
            with lowtide.apply(model, policy):
                objective(model(**batch), None).backward()  # type: ignore[no-untyped-call]
        except REFUSALS as error:
            refused[policy] = f"{type(error).__name__}: {error}"
            return False
        except Exception:  # noqa: BLE001  no refusal: the audit says what it is
            return True
        finally:
            model.zero_grad()
        return True

    accepted = [policy for policy in POLICIES if accepts(policy)]
    accepted += next(([policy] for policy in TILED if accepts(policy)), [])
    return accepted, refused


def _confirm(record: Record, first: list[AuditReport], second: list[AuditReport]) -> None:
    again = {(check.mode, check.name) for report in second for check in report.failures}
    for report in first:
        for check in report.failures:
            known: dict[str, Any] = check.to_dict()
            del known["verdict"]
            known["command"] = command_for(record.model_type, record.engine, check.mode)
            (record.failures if (check.mode, check.name) in again else record.unconfirmed).append(known)


def _stacks(report: AuditReport) -> list[str]:
    blocks = next(iter(report.blocks.values()), [])
    return [f"{name} x{count}" for name, count in collections.Counter(block["stack"] for block in blocks).items()]
