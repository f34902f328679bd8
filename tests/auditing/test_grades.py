"""How bad a failure is, what counts, and the sentence that leads the report."""

from __future__ import annotations

import json

import pytest
import torch

from lowtide.auditing import CHECKS, AuditReport, CannotAuditError, CheckResult, Grade, Verdict, audit
from lowtide.auditing.conclusion import _STATEMENTS
from lowtide.auditing.grades import GRADES
from lowtide.auditing.result import RUNS
from models import engines
from models.engines import Engine, loss, net
from support.sample_reports import check


def one(*checks: CheckResult, **known) -> AuditReport:
    return AuditReport(model="M", seed=0, blocks={}, checks=list(checks), **known)


def test_every_check_has_a_grade_and_a_statement():
    assert set(GRADES) == {RUNS, *CHECKS}
    assert set(_STATEMENTS) == set(GRADES) - {"recomputed"}


@pytest.mark.parametrize(
    ("engine", "grade", "sentence"),
    [
        (engines.SkipsALayer, Grade.NO_EFFECT, "Gradients are right; layers is not wholly recomputed"),
        (engines.DoesNothing, Grade.NO_EFFECT, "Gradients are right; nothing is recomputed; no memory is saved"),
        (engines.ChangesAGradient, Grade.WRONG, "Gradients are wrong"),
        (engines.LosesTheInPlaceCheck, Grade.UNSAFE, "Gradients are right; a change in place goes unnoticed"),
        (engines.CannotBeUndone, Grade.UNTIDY, "Gradients are right; untidy: switched off, it leaves something behind"),
        (Engine, None, "Gradients are right, and no check failed"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
@pytest.mark.parametrize("fail_on", Grade)
def test_what_counts_goes_by_the_grade(engine, grade, sentence, fail_on):
    model, batch = net()
    names = [name for name in CHECKS if name != "adapters on a frozen base"]
    report = audit(model, batch, configure=engine(), loss=loss, fail_on=fail_on, checks=names)
    assert {failure.grade for failure in report.failures} == ({grade} if grade else set()), report
    assert report.ok == (grade is None or list(Grade).index(grade) < list(Grade).index(fail_on))
    assert report.conclusion == sentence
    assert str(report).startswith(f"Net: {sentence}\n")
    data = json.loads(report.to_json())
    assert (data["conclusion"], data["fail_on"]) == (sentence, fail_on)
    assert {entry["grade"] for entry in data["checks"]} == {None, *([grade] if grade else [])}


def test_what_holds_for_one_mode_names_it():
    report = one(
        check("gradient values", Verdict.PASS),
        check("idempotent", Verdict.FAIL),
        check("gradient values", Verdict.FAIL, mode="reentrant"),
        check("idempotent", Verdict.FAIL, mode="reentrant"),
    )
    assert report.conclusion == (
        "Gradients are right (default); gradients are wrong (reentrant); untidy: switched on twice, it adds up"
    )


def test_gradients_that_are_not_proven_are_not_ok_whatever_counts():
    report = one(check("gradient values", Verdict.INCONCLUSIVE), check("memory", Verdict.PASS), fail_on=Grade.WRONG)
    assert not report.ok


def test_an_unknown_grade():
    model, batch = net()
    with pytest.raises(CannotAuditError, match="unknown grade 'bad': choose from wrong, no-effect, unsafe, untidy"):
        audit(model, batch, configure=Engine(), loss=loss, fail_on="bad")


class DoublesInCopies(Engine):
    """Knows its model by its identity, which a copy does not have."""

    def __call__(self, model):
        applied = super().__call__(model)
        model.original = id(model)
        model.register_forward_hook(double_in_copies)
        return applied


def double_in_copies(model, args, output):
    return output if model.original == id(model) else 2 * output


def test_a_copy_with_wrong_gradients_is_worse_than_untidy():
    model, batch = net()
    report = audit(model, batch, configure=DoublesInCopies(), loss=loss, checks=["copy and pickle"])
    (failure,) = report.failures
    assert failure.grade is Grade.WRONG
    assert "embed.weight" in failure.summary


def raises(*args, **kwargs):
    raise RuntimeError("torn down")


class BreaksWhenUndone(Engine):
    def remove(self, model):
        super().remove(model)
        model.layers[0].forward = raises


class RaisesWhenUndone(Engine):
    def remove(self, model):
        raise KeyError("layers")


class BreaksTheSecondTime(Engine):
    def __call__(self, model):
        if not self.wraps(model.layers[0]):
            model.layers[0].forward = raises
        return super().__call__(model)


class RefusesTheSecondTime(Engine):
    def __call__(self, model):
        if not self.wraps(model.layers[0]):
            raise ValueError("it is on already")
        return super().__call__(model)


class DiesInCopies(DoublesInCopies):
    def __call__(self, model):
        applied = super().__call__(model)
        model.register_forward_hook(raise_in_copies)
        return applied


def raise_in_copies(model, args, output):
    if model.original != id(model):
        raise RuntimeError("not the original")


@pytest.mark.parametrize(
    ("engine", "name", "grade", "sentence"),
    [
        (BreaksWhenUndone, "reversible", Grade.WRONG, "switched off, it raises"),
        (RaisesWhenUndone, "reversible", Grade.WRONG, "switched off, it raises"),
        (BreaksTheSecondTime, "idempotent", Grade.WRONG, "switched on twice, it raises"),
        (RefusesTheSecondTime, "idempotent", Grade.UNTIDY, "untidy: switched on twice, it adds up"),
        (DiesInCopies, "copy and pickle", Grade.WRONG, "copied, it raises"),
    ],
)
def test_a_model_that_no_longer_runs_is_not_untidy(engine, name, grade, sentence):
    model, batch = net()
    report = audit(model, batch, configure=engine(), loss=loss, checks=["gradient values", name])
    (failure,) = report.failures
    assert (failure.name, failure.grade, report.ok) == (name, grade, grade is Grade.UNTIDY), report
    assert report.conclusion == f"Gradients are right; {sentence}"
    assert AuditReport.from_json(report.to_json())[name].grade is grade


class Cut(engines.Net):
    """The last two layers see what the first ones computed, and pass no gradient back to them."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = torch.nn.Linear(engines.WIDTH, engines.WIDTH)
        self.aside = torch.nn.Linear(engines.WIDTH, engines.WIDTH)

    def forward(self, ids):
        x = self.embed(ids)
        for number, layer in enumerate(self.layers):
            x = layer(x.detach() if number == 4 else x)
        self.aside(x)
        return self.head(x)


def test_a_cut_graph_is_not_ok():
    torch.manual_seed(0)
    model, batch = Cut(), net()[1]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    report = audit(model, batch, configure=Engine(), loss=loss)
    result = report["parameters reached"]
    assert (result.mode, result.grade, report.ok) == ("plain model", Grade.WRONG, False)
    lost = {
        name for name, _ in model.named_parameters() if name.startswith(("embed", *(f"layers.{n}." for n in range(4))))
    }
    assert result.evidence["count"] == len(lost)
    assert set(result.evidence["cut"]) <= lost
    assert "embed.weight" in result.summary
    assert result.evidence["unused"] == {
        "in unused, which forward never calls": ["unused.weight", "unused.bias"],
        "in modules whose result the loss does not depend on, or only by an index that they pick": [
            "aside.weight",
            "aside.bias",
        ],
    }
    assert (
        report.conclusion == "Gradients are the plain model's; the model's own code cuts parameters off from the loss"
    )
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_parameters_that_the_batch_does_not_use_are_named_and_fine():
    class Whole(Cut):
        def forward(self, ids):
            with torch.no_grad():
                self.aside(self.embed(ids))
            return engines.Net.forward(self, ids)

    model, batch = Whole(), net()[1]
    report = audit(model, batch, configure=Engine(), loss=loss, checks=["parameters reached"])
    assert report.ok, report
    assert "2 in unused, which forward never calls" in report["parameters reached"].summary
    model.requires_grad_(False).head.requires_grad_()
    (result,) = audit(model, batch, configure=Engine(), loss=loss, checks=["parameters reached"]).checks
    assert result.summary == "the loss's graph reaches all 2 trainable parameters"
