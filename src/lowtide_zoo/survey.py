"""Audits the zoo: one process per architecture, a few at a time, each with a time limit.

An architecture is found, built and audited; and audited again if something failed. False alarms cost more than a missed
fault, so a failed check counts only if it fails again with other weights and another batch.

Processes are forked from a server that has imported torch and transformers once. A crash or a hang costs one
architecture, never the survey; and what is done is on disk.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import importlib.metadata
import multiprocessing
import time
import warnings
from typing import TYPE_CHECKING, Any

import torch

import lowtide
import lowtide_zoo as zoo
from lowtide.auditing import CHECKS, AuditReport, CannotAuditError, CheckResult, Grade, Verdict, audit
from lowtide.auditing.audit import OF_PLAIN_MODEL
from lowtide.auditing.baseline import in_both
from lowtide.auditing.setups import AS_IT_IS, MODES, PLAIN
from lowtide.errors import (
    CacheError,
    CannotSetUpError,
    LogitsNotComputedError,
    MissingDependencyError,
    NoRegionError,
    NotTokenWiseError,
    SilentNoOpError,
)
from lowtide.objective import objective
from lowtide_zoo.issue import is_shown
from lowtide_zoo.peers import PEERS, audit_peer, require
from lowtide_zoo.records import Record, command_for, read_records, surveyed, unfinished
from lowtide_zoo.subjects import Subject, subjects_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from torch import nn

    from lowtide_zoo.records import Status

DROPOUT = 0.1

POLICIES = ("recompute",)

TILED = (
    "recompute+tile(tokens=8, loss_tokens=8)",
    "recompute+tile(attention, mlp, tokens=8)",
    "recompute+tile(mlp, tokens=8)",
    "recompute+tile(loss, loss_tokens=8)",
)
"""Policies of which the first that is not refused is audited: not every model has a head, or an MLP as a module. Tiles
are small because batches are."""

REFUSALS = (NoRegionError, NotTokenWiseError, LogitsNotComputedError, SilentNoOpError, CacheError)
"""The errors by which Lowtide refuses, before the first step is over, to run a model under a policy."""

PRELOAD = ["torch._dynamo", "transformers", "transformers.modeling_utils", "lowtide_zoo.survey"]

_VALUE_CHECKS = {"gradients present", "gradient values", "experts", "outputs"}


class Engine(enum.StrEnum):
    TRANSFORMERS = "transformers"
    """The model's own flag, in both of its modes."""
    LOWTIDE = "lowtide"
    """`lowtide.apply`, with recomputation and with tiles."""
    TRL = "trl"
    ACCELERATE = "accelerate"
    DEEPSPEED = "deepspeed"
    PEFT_KBIT = "peft-kbit"
    UNSLOTH = "unsloth"
    AXOLOTL = "axolotl"
    """Set-ups of other libraries (`peers`)."""


def run_survey(
    model_types: Sequence[str | Subject],
    engine: Engine,
    path: Path,
    *,
    workers: int = 2,
    timeout: float = 180,
    resume: bool = False,
    on_record: Callable[[Record], None] = lambda _: None,
) -> list[Record]:
    """Audit all of these model types, and write a line for each; with `resume`, skip those that the file has already.

    A subject in the place of a model type names a class or a variant. Without `resume`, the file's records of these
    subjects under this engine are replaced; all other records stay.
    """
    require(engine.value)
    subjects = [Subject(item) if isinstance(item, str) else item for item in model_types]
    _prepare(path, engine, () if resume else subjects)
    done = surveyed(path, engine.value)
    waiting = [subject for subject in subjects if subject not in done]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    jobs: list[_Job] = []
    with path.open("a") as file:
        while waiting or jobs:
            while waiting and len(jobs) < workers:
                jobs.append(_Job(context, waiting.pop(0), engine))
            for job in list(jobs):
                record = job.poll(timeout)
                if record is not None:
                    jobs.remove(job)
                    file.write(record.to_json() + "\n")
                    file.flush()
                    on_record(record)
            time.sleep(0.02)
    wanted = set(subjects)
    return [r for r in read_records(path) if r.engine == engine.value and r.subject in wanted]


def find_subjects(
    model_types: Sequence[str],
    *,
    every_class: bool,
    variants: bool,
    workers: int = 2,
    on_type: Callable[[str], None] = lambda _: None,
) -> list[Subject]:
    """List what a survey of these types audits, in as many processes; classes are built without values to tell them."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    found: list[Subject] = []
    look = functools.partial(subjects_of, every_class=every_class, variants=variants)
    with context.Pool(workers) as pool:
        for subjects in pool.imap(look, model_types):
            found += subjects
            on_type(subjects[0].model_type)
    return found


def _prepare(path: Path, engine: Engine, replaced: Sequence[Subject]) -> None:
    """Cut the file to whole lines, as a killed run may have left half a line, and drop the records to be replaced."""
    gone = set(replaced)
    kept = [record for record in read_records(path) if record.engine != engine.value or record.subject not in gone]
    path.write_text("".join(f"{record.to_json()}\n" for record in kept))


class _Job:
    """The audit of one architecture in its own process."""

    def __init__(self, context: Any, subject: Subject, engine: Engine) -> None:
        self._subject, self._engine = subject, engine
        self._receiver, sender = context.Pipe(duplex=False)
        self._process = context.Process(target=_work, args=(subject, engine.value, sender), daemon=True)
        self._process.start()
        sender.close()
        self._started = time.monotonic()

    def poll(self, timeout: float) -> Record | None:
        """Return the record once there is one, or a record of what went wrong if there will be none."""
        record = None
        if self._receiver.poll():
            try:
                record = self._receiver.recv()
            except EOFError:
                self._process.join()
                record = self._unfinished("failed to run", f"the process died with code {self._process.exitcode}")
        elif time.monotonic() - self._started > timeout:
            record = self._unfinished("timed out", f"no result within {timeout:.0f} s")
        if record is not None:
            self._process.kill()
            self._process.join()
            self._receiver.close()
        return record

    def _unfinished(self, status: Status, why: str) -> Record:
        return unfinished(self._subject, self._engine.value, status, why, time.monotonic() - self._started)


def _work(subject: Subject, engine: str, sender: Any) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # models warn about odd set-ups, which the verdicts report anyway
    try:
        record = survey_one(subject, Engine(engine))
    except Exception as error:  # noqa: BLE001  whatever it was, it costs one architecture
        record = unfinished(subject, engine, "failed to run", f"{type(error).__name__}: {error}")
    sender.send(record)
    sender.close()


def survey_one(subject: Subject | str, engine: Engine) -> Record:
    """Find, build and audit one architecture, in this process."""
    started = time.monotonic()
    subject = Subject(subject) if isinstance(subject, str) else subject
    record = Record(
        model_type=subject.model_type,
        subject_class=subject.model_class,
        variant=subject.variant,
        engine=engine.value,
        status="audited",
        versions={name: importlib.metadata.version(name) for name in ("torch", "transformers", "lowtide")},
        command=command_for(subject, engine.value),
    )
    try:
        tiny_model = zoo.find(
            subject.model_type, model_class=subject.model_class or None, variant=subject.variant or None
        )
        record.model_class = tiny_model.model_class
        _survey(record, tiny_model, engine)
    except zoo.CannotBuildError as error:
        record.status, record.why = "not built", "; ".join(list(dict.fromkeys(error.reasons))[:3])
    except (CannotSetUpError, MissingDependencyError) as error:
        record.status, record.why = "refused", str(error)
    except CannotAuditError as error:
        record.status, record.why = "failed to run", str(error)
    record.seconds = round(time.monotonic() - started, 2)
    return record


def _survey(record: Record, tiny_model: zoo.TinyModel, engine: Engine) -> None:
    model = tiny_model.build(0)
    if engine not in (Engine.LOWTIDE, Engine.ACCELERATE) and not getattr(
        model, "supports_gradient_checkpointing", False
    ):
        record.status, record.why = "no checkpointing", f"{tiny_model.model_class} does not support it"
        if engine is Engine.TRANSFORMERS:
            _enter(record, tiny_model, functools.partial(_audit_plain_model, tiny_model))
        return
    accepted, refusals = _policies(model, tiny_model.batch(0), record) if engine is Engine.LOWTIDE else ([], {})
    if refusals and not accepted:
        record.status, record.why = "refused", "; ".join(refusals.values())
        return
    if refusals:
        record.why = "; ".join(f"{policy} is refused: {why}" for policy, why in refusals.items())
    _enter(record, tiny_model, functools.partial(audit_tiny_model, tiny_model, engine, accepted))


def _enter(record: Record, tiny_model: zoo.TinyModel, audited: Callable[..., list[AuditReport]]) -> None:
    """Audit, audit what failed again with other weights and another batch, and show what failed again by scripts."""
    reports = audited(seed=0)
    record.stacks = _stacks(reports[0])
    record.verdicts = {
        check.mode: {c.name: c.verdict.value for c in report.checks if c.mode == check.mode}
        for report in reports
        for check in report.checks
    }
    if any(report.failures for report in reports):
        names = {check.name for report in reports for check in report.failures if check.name in CHECKS}
        again = functools.partial(audited, seed=1, checks=sorted(names))
        failed = confirm(record, reports, _audit_again(record, again))
        if record.engine == Engine.TRANSFORMERS.value:
            record.shown = {
                f"{check.mode}: {check.name}": is_shown(tiny_model, check)
                for check in failed
                if check.grade is not Grade.UNTIDY
            }


def _audit_plain_model(tiny_model: zoo.TinyModel, *, seed: int, checks: list[str] | None = None) -> list[AuditReport]:
    """Run the checks of the model itself."""
    del checks
    model, batch = tiny_model.build(seed), tiny_model.batch(seed)
    return [audit(model, batch, modes=[AS_IT_IS], checks=OF_PLAIN_MODEL, dropout=DROPOUT, seed=seed)]


def _policies(
    model: nn.Module, batch: dict[str, Any], record: Record | None = None
) -> tuple[list[str], dict[str, str]]:
    """Return the policies to audit, and those that Lowtide refuses for this model, with its words.

    A whole step is run under each, because the guard reports at the end of backward. The record gets which blocks ran
    in tiles.
    """
    refused: dict[str, str] = {}

    def accepts(policy: str) -> bool:
        try:
            with lowtide.apply(model, policy) as applied:
                objective(model(**batch), None).backward()  # type: ignore[no-untyped-call]
                if record is not None:
                    record.tiled_blocks, record.left_alone = _tiled_blocks(applied)
        except REFUSALS as error:
            refused[policy] = f"{type(error).__name__}: {error}"
            return False
        except Exception:  # noqa: BLE001  not a refusal: the audit says what it is
            return True
        finally:
            model.zero_grad()
        return True

    accepted = [policy for policy in POLICIES if accepts(policy)]
    accepted += next(([policy] for policy in TILED if accepts(policy)), [])
    return accepted, refused


def _tiled_blocks(applied: lowtide.Applied) -> tuple[list[str], dict[str, str]]:
    """Return the regions that ran in tiles as a whole, and those that were left alone, with the reasons."""
    names = {region.name for region in applied.regions}
    blocks = [tiles for tiles in applied.report().tiles if tiles.name in names]
    tiled = [tiles.name for tiles in blocks if tiles.tiles > tiles.calls]
    return tiled, {tiles.name: tiles.left_alone for tiles in blocks if tiles.left_alone}


def audit_tiny_model(
    tiny_model: zoo.TinyModel, engine: Engine, policies: list[str], *, seed: int, checks: list[str] | None = None
) -> list[AuditReport]:
    """Return one report for transformers' own modes or a peer's, or one per policy."""
    model, batch = tiny_model.build(seed), tiny_model.batch(seed)
    if engine.value in PEERS:
        return [audit_peer(engine.value, model, batch, checks=checks, dropout=DROPOUT, seed=seed)]
    if engine is Engine.TRANSFORMERS:
        return [audit(model, batch, modes=MODES, checks=checks, dropout=DROPOUT, seed=seed)]
    return [_audit_policy(model, batch, policy, seed, checks) for policy in policies]


def _audit_policy(
    model: nn.Module, batch: dict[str, Any], policy: str, seed: int, checks: list[str] | None
) -> AuditReport:
    def configure(model: nn.Module) -> lowtide.Applied:
        return lowtide.apply(model, policy)

    dropout = dropout_under(lowtide.Policy.parse(policy))
    report = audit(model, batch, configure=configure, checks=checks, dropout=dropout, seed=seed)
    return dataclasses.replace(
        report,
        checks=[
            dataclasses.replace(check, mode=policy)
            for check in _comparable(policy, report.checks)
            if check.mode != PLAIN  # what is said about the plain model, transformers' survey says
        ],
        blocks=dict(zip([policy], report.blocks.values(), strict=False)),  # empty if the set-up did not run
    )


def dropout_under(policy: lowtide.Policy) -> float:
    """Return the dropout to audit with: none under tiles, whose masks differ from those of the whole input."""
    return 0.0 if any(part.tile for part in (policy, *(rule for _, rule in policy.overrides))) else DROPOUT


def _comparable(policy: str, checks: list[CheckResult]) -> list[CheckResult]:
    """Judge no values where the tiled part of a model draws random numbers by itself, as PhiMoE's router does."""
    if "tile" not in policy or not any(check.evidence.get("other_draws_in_forward") for check in checks):
        return checks
    return [
        dataclasses.replace(
            check, verdict=Verdict.INCONCLUSIVE, summary=f"{check.summary}; but each tile draws its own random numbers"
        )
        if check.name in _VALUE_CHECKS and check.verdict is Verdict.FAIL
        else check
        for check in checks
    ]


def _audit_again(record: Record, audited: Callable[[], list[AuditReport]]) -> list[AuditReport]:
    """Audit with other weights and another batch. If that cannot be run, the failures are kept as unconfirmed."""
    try:
        return audited()
    except Exception as error:  # noqa: BLE001  whatever it was, the first audit stands
        why = f"what failed could not be confirmed: {type(error).__name__}: {error}"
        record.why = f"{record.why}; {why}" if record.why else why
        return []


def confirm(record: Record, first: list[AuditReport], second: list[AuditReport]) -> list[CheckResult]:
    """Enter the failures of the first audit: those that failed in the second, too, and those that did not.

    Both must fail for the same parameters or blocks, and only these are entered. Return the checks that failed twice.
    """
    again = {(check.mode, check.name): check for report in second for check in report.failures}
    twice = []
    for report in first:
        for check in report.failures:
            other = again.get((check.mode, check.name))
            both = None if other is None else in_both(check, other)
            failure: dict[str, Any] = (both or check).to_dict()
            del failure["verdict"], failure["known"]
            failure["command"] = command_for(record.subject, record.engine, check.mode)
            (record.unconfirmed if both is None else record.failures).append(failure)
            twice += [both] if both is not None else []
    return twice


def _stacks(report: AuditReport) -> list[str]:
    blocks = next(iter(report.blocks.values()), [])
    return [f"{name} x{count}" for name, count in collections.Counter(block["stack"] for block in blocks).items()]
