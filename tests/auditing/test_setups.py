"""What is judged if nobody says it: the model as it is, if it is set up; else transformers' own flag."""

from __future__ import annotations

import pytest

import lowtide
from lowtide.auditing import Verdict, audit
from models import tiny as tiny_models
from support.foreign_warnings import ignore_warnings_of

pytestmark = ignore_warnings_of("torch", "transformers")


@pytest.mark.parametrize("policy", ["recompute", "recompute+tile(tokens=8, loss_tokens=8)"])
def test_a_policy_in_force_is_what_is_judged(policy):
    model, batch = tiny_models.llama()
    applied = lowtide.apply(model, policy)
    report = audit(model, batch)
    assert {check.mode for check in report.checks} == {"plain model", "as it is"}, report
    assert report.ok, report
    assert report["recomputed"].evidence["stacks"][0]["recomputed"] == 2
    assert report["memory"].evidence["plain_bytes"] > 2 * report["memory"].evidence["bytes"], "the reference is plain"
    assert report["copy and pickle"].verdict is Verdict.PASS
    assert report["reversible"].verdict is report["idempotent"].verdict is Verdict.NOT_APPLICABLE
    applied.remove()
    assert {check.mode for check in audit(model, batch, checks=["memory"]).checks} == {"default", "reentrant"}


def test_a_copy_of_what_is_set_up_is_not():
    import copy

    model, batch = tiny_models.llama()
    lowtide.apply(model, "recompute")
    report = audit(copy.deepcopy(model), batch, checks=["recomputed"])
    assert {check.mode for check in report.checks} == {"default", "reentrant"}


def test_the_flag_is_judged_as_it_is_if_it_is_on():
    model, batch = tiny_models.llama()
    model.gradient_checkpointing_enable()
    report = audit(model, batch, checks=["recomputed", "copy and pickle"])
    assert {check.mode for check in report.checks} == {"as it is"}
    assert report["recomputed"].verdict is Verdict.PASS
