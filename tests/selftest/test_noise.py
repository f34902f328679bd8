"""A plain model that differs from run to run: what may be called wrong beside it, and what may not."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lowtide
from lowtide import simdevice
from lowtide.selftest import right, stress
from lowtide.selftest.findings import Findings
from lowtide.selftest.noise import MANY, OWN_NOISE, PlainRuns
from lowtide.stores import host


def gradients(noisy: float = 0.0, steady: float = 0.0) -> dict[str, torch.Tensor]:
    """The gradients of two weights, each with a relative error."""
    return {"noisy": torch.ones(4) + noisy, "steady": torch.ones(4) + steady}


def runs_of(errors: list[float]) -> PlainRuns:
    """Runs of a plain model, of which one gradient has these errors in turn."""
    each = itertools.chain([0.0], itertools.cycle(errors))
    return PlainRuns(lambda: gradients(next(each)))


@pytest.mark.parametrize(
    ("own", "found", "verdict", "said"),
    [
        ([0.0], gradients(), "pass", "bit-identical"),
        ([0.0], gradients(steady=1e-5), "fail", "where nothing may: steady"),
        ([1e-5], gradients(noisy=1e-5), "pass", OWN_NOISE),
        ([0.0, 0.0, 0.0, 0.0, 1e-5], gradients(noisy=1e-5), "pass", OWN_NOISE),
        ([1e-5], gradients(noisy=5e-5), "fail", "where nothing may: noisy"),
        ([1e-5], gradients(noisy=1e-5, steady=1e-5), "fail", "where nothing may: steady"),
        ([1e-5], gradients(steady=1e-2), "fail", "1 gradients are wrong: steady"),
        ([0.0, 0.0, 0.0, 0.0, 1e-3], gradients(noisy=2e-3), "pass", OWN_NOISE),
        ([0.1], gradients(noisy=0.1), "inconclusive", "the plain model's own gradients differ by"),
    ],
)
def test_a_difference_is_excused_where_the_plain_model_makes_it_too(own, found, verdict, said):
    judged = runs_of(own).judge(found)
    assert judged.verdict == verdict, judged
    assert said in judged.summary


def test_tiles_round_and_are_not_called_noise():
    judged = runs_of([0.0]).judge(gradients(steady=1e-5), rounds=True)
    assert (judged.verdict, OWN_NOISE in judged.summary) == ("pass", False)
    assert runs_of([0.0]).judge(gradients(steady=1e-2), rounds=True).verdict == "fail"


def test_the_plain_model_runs_often_before_anything_is_wrong():
    counted = itertools.count()
    plain = PlainRuns(lambda: (next(counted), gradients())[1])
    plain.judge(gradients())
    assert next(counted) < MANY
    plain.judge(gradients(steady=1.0))
    assert next(counted) > MANY


class _Shaken(torch.autograd.Function):
    """Changes a gradient by a little in some runs, as sums do that are added up with atomic operations."""

    @staticmethod
    def forward(ctx, weight, shake):
        ctx.shake = shake
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * (1 + 1e-6 * ctx.shake()), None


class Shaky(nn.Module):
    """A linear layer whose weight's gradient differs in about two of three runs."""

    shake = staticmethod(lambda: 0)

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.weight = linear.weight

    def forward(self, x):
        return F.linear(x, _Shaken.apply(self.weight, type(self).shake))


@pytest.fixture
def shaky_model(monkeypatch):
    """The models of the stage, with one weight whose gradient differs by itself: not in the first runs, then mostly."""
    chance = random.Random(1)  # noqa: S311
    values = itertools.chain([0, 0], (chance.choice([-1, 0, 1]) for _ in itertools.count()))
    monkeypatch.setattr(Shaky, "shake", staticmethod(lambda: next(values)))
    real = right.build

    def build(family, **settings):
        model, batch = real(family, **settings)
        block = model.model.layers[1].mlp
        block.down_proj = Shaky(block.down_proj)
        return model, batch

    monkeypatch.setattr(right, "build", build)
    monkeypatch.setattr(stress, "build", build)


CASE = right.Case("llama", "recompute+offload", "fp32")


def test_the_matrix_excuses_what_the_plain_model_does_by_itself(small_bench, shaky_model):
    row = right.judge(small_bench, CASE)
    assert (row.verdict, row.figures["identical"], row.figures["own_noise"]) == ("pass", False, True), row
    assert OWN_NOISE in row.summary


def test_an_error_elsewhere_is_not_excused(small_bench, shaky_model, monkeypatch):
    """The engine is off by as little, in all other gradients, too."""
    fetch = host.HostStored._finish_fetch
    monkeypatch.setattr(host.HostStored, "_finish_fetch", lambda self: _off(fetch(self)))
    row = right.judge(small_bench, CASE)
    assert row.verdict == "fail", row


def test_an_error_of_one_run_is_not_excused_because_others_are_right(small_bench, shaky_model, monkeypatch):
    """As a race that shows once: what the audit saw must be explained by the plain model's noise, not by fresh runs."""
    audit, fetch = lowtide.audit, host.HostStored._finish_fetch

    def off_in_the_audit(*arguments, **settings):
        with monkeypatch.context() as patch:
            patch.setattr(host.HostStored, "_finish_fetch", lambda self: _off(fetch(self)))
            return audit(*arguments, **settings)

    monkeypatch.setattr(lowtide, "audit", off_in_the_audit)
    row = right.judge(small_bench, CASE)
    assert row.verdict == "fail", row


def _off(raw: torch.Tensor) -> torch.Tensor:
    numbers = raw.view(torch.float32)
    return (numbers * (1 + 1e-6)).view(raw.dtype)


def test_stress_excuses_it_too_and_still_finds_a_missing_wait(small_bench, shaky_model, monkeypatch):
    found = Findings(bench=small_bench)
    stress.run(small_bench, found)
    assert {row.verdict for row in found.rows} == {"pass"}
    assert any(OWN_NOISE in row.summary for row in found.rows)
    monkeypatch.setattr(host.StreamWaits, "wait", lambda *_: None)
    broken = Findings(bench=small_bench)
    stress.run(small_bench, broken)
    simdevice.reset()
    assert any("wrong gradients" in row.summary for row in broken.rows if row.verdict == "fail")
