"""The reference: nothing is recomputed in it; and its run in double precision acquits gradients that are rounding."""

from __future__ import annotations

import functools

import pytest
import torch
from torch.nn import functional as F

import lowtide
import lowtide.auditing.reference
from lowtide.auditing import Verdict, audit
from lowtide.auditing.comparison import as_near
from lowtide.auditing.reference import Reference
from lowtide.auditing.step import Experiment
from models.engines import Block, DoesNothing, Engine, Net, loss, net


class WithAnEmptyParameter(Net):
    def __init__(self) -> None:
        super().__init__()
        self.empty = torch.nn.Parameter(torch.empty(0))

    def forward(self, ids):
        return super().forward(ids) + self.empty.sum()


def reference(model) -> Reference:
    def over_rows(logits):
        return logits.log_softmax(0)[0].mean()

    return Reference(model, Experiment(net()[1], over_rows, (), 0, 0.0))


def test_an_empty_parameter_hides_no_other():
    """What is the same for all choices cancels in their softmax."""
    zeros = reference(WithAnEmptyParameter()).zero_by_mathematics()
    assert zeros == {"head.bias", "layers.5.down.bias", "empty"}, "what is added to every row"


class SingleOnly(Net):
    runs = 0

    def forward(self, ids):
        type(self).runs += 1
        if self.head.weight.dtype is torch.double:
            raise TypeError("single precision only")
        return super().forward(ids)


def test_a_model_that_cannot_run_in_double_precision_is_tried_once():
    single = reference(SingleOnly())
    assert single.zero_by_mathematics() == single.zero_by_mathematics() == set()
    assert SingleOnly.runs == 3


class RecomputesByItself(Net):
    """Its code calls a function that it keeps."""

    def __init__(self, by=lowtide.checkpoint, **options) -> None:
        super().__init__()
        self.run, self.options = by, options

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = self.run(layer, x, **self.options)
        return self.head(x)


def test_a_reference_that_recomputes_too_proves_nothing():
    report = audit(RecomputesByItself(), net()[1], loss=loss)
    assert not report.failures, report
    undecided = {check.name for check in report.checks if check.verdict is Verdict.INCONCLUSIVE}
    assert undecided == {"recomputed", "memory", "gradients present", "gradient values"}, report
    assert "reference=" in report["recomputed"].remedy


def test_a_plain_twin_proves_it():
    torch.manual_seed(0)
    model = RecomputesByItself()
    report = audit(model, net()[1], loss=loss, reference=net()[0])
    assert report.ok, report
    assert report["recomputed"].evidence["stacks"][0]["recomputed"] == 6


def test_what_is_recomputed_on_top_of_it_is_judged():
    """Half of the layers by their own code; all of the others are left to the set-up."""

    class Half(RecomputesByItself):
        def forward(self, ids):
            x = self.embed(ids)
            for layer in self.layers:
                x = self.run(layer, x)
            for layer in self.others:
                x = layer(x)
            return self.head(x)

    class Others(Engine):
        def blocks(self, model):
            return list(model.others)

    model = Half()
    model.others = torch.nn.ModuleList(Block() for _ in range(6))
    report = audit(model, net()[1], loss=loss, configure=Others(), checks=["recomputed", "memory", "gradient values"])
    assert report.ok, report
    assert [stack["name"] for stack in report["recomputed"].evidence["stacks"]] == ["others"]
    report = audit(model, net()[1], loss=loss, configure=DoesNothing(), checks=["recomputed", "gradient values"])
    assert report["recomputed"].verdict is Verdict.INCONCLUSIVE
    assert report["gradient values"].verdict is Verdict.PASS, "the set-up changes nothing, and that is compared"


def test_a_module_that_keeps_torchs_function_has_a_plain_reference():
    by = torch.utils.checkpoint.checkpoint
    model = RecomputesByItself(by, use_reentrant=False)
    report = audit(model, net()[1], loss=loss, checks=["recomputed", "memory"])
    assert report.ok, report
    assert report["recomputed"].evidence["stacks"][0]["recomputed"] == 6
    assert model.run is by, "put back"


class Amplifies(Net):
    """Turns the last bits of the activations into the fourth digit of the gradients, and runs in float32 only."""

    def forward(self, ids):
        logits = super().forward(ids)
        if logits.dtype is not torch.float32:
            raise TypeError("single precision only")
        return (3000 * logits).sin()


class SumsInHalves(Engine):
    """Computes each block's down projection as a sum of two halves: the same number, rounded differently."""

    scale = 1.0

    def __call__(self, model):
        for layer in self.blocks(model):
            layer.down.forward = functools.partial(self.in_halves, layer.down)
        return super().__call__(model)

    def in_halves(self, linear, x):
        middle = x.shape[-1] // 2
        halves = (F.linear(x[..., part], linear.weight[:, part]) for part in (slice(middle), slice(middle, None)))
        return sum(halves) * self.scale + linear.bias


class SlightlyWrong(SumsInHalves):
    scale = 1.001


@pytest.mark.parametrize(("engine", "is_right"), [(SumsInHalves, True), (SlightlyWrong, False)])
def test_rounding_that_a_model_amplifies_is_told_by_the_last_bits_of_its_weights(engine, is_right, monkeypatch):
    torch.manual_seed(0)
    model, batch = Amplifies(), net()[1]
    options = {"configure": engine(), "loss": loss, "checks": ["gradient values"]}
    assert audit(model, batch, **options).ok == is_right
    monkeypatch.setattr(lowtide.auditing.reference, "as_rounded", lambda *_: set())
    assert not audit(model, batch, **options).ok, "the tolerance alone cannot tell"


def test_double_precision_is_computed_on_the_cpu_where_the_device_has_none(sim, monkeypatch):
    """As on Apple's GPUs; the true gradients are then compared with gradients on the device."""
    expected, (model, (ids,)) = reference(net()[0]), net()
    there = Reference(model.to(sim), Experiment((ids.to(sim),), expected.experiment.loss, (), 0, 0.0))
    monkeypatch.setattr(lowtide.auditing.precision, "device_of", lambda _: torch.device("mps"))
    true, same = there._gradients_in_double(None), expected._gradients_in_double(None)
    assert {gradient.device.type for gradient in true.values()} == {"cpu"}
    assert all(torch.equal(true[name], same[name]) for name in same)
    names = there.first.gradients.keys() - there.zero_by_mathematics()
    assert as_near(true, there.first.gradients, there.first.gradients, names) == names


class AsksForSingle(Net):
    """Has a part that computes in float32 by name, so that `double()` alone mixes precisions; and it amplifies."""

    def forward(self, ids):
        x = self.embed(ids).to(torch.float32)
        for layer in self.layers:
            x = layer(x)
        return (3000 * self.head(x)).float().sin()


@pytest.mark.parametrize(("engine", "is_right"), [(SumsInHalves, True), (SlightlyWrong, False)])
def test_rounding_is_told_by_double_precision_in_code_that_asks_for_single(engine, is_right, monkeypatch):
    torch.manual_seed(0)
    model, batch = AsksForSingle(), net()[1]
    with pytest.raises(RuntimeError, match="dtype"):
        AsksForSingle().double()(*batch)
    monkeypatch.setattr(lowtide.auditing.reference, "as_rounded", lambda *_: set())
    options = {"configure": engine(), "loss": loss, "checks": ["gradient values"]}
    assert audit(model, batch, **options).ok == is_right
    assert (model.head.weight.dtype, torch.get_default_dtype()) == (torch.float32, torch.float32)
