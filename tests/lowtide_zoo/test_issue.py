"""Failures written up for their maintainers: the scripts run without Lowtide, and show the fault."""

from __future__ import annotations

import dataclasses
import re

import pytest
import transformers
from packaging.version import Version

import lowtide_zoo as zoo
from lowtide.auditing import AuditReport, CannotAuditError, Verdict, audit
from lowtide_zoo.issue import shows, shows_here, write_issue
from support import needs_zoo
from support.foreign_warnings import ignore_warnings_of
from support.sample_reports import check

pytestmark = [
    needs_zoo,
    ignore_warnings_of("torch", "transformers"),
    pytest.mark.skipif(Version(transformers.__version__) < Version("5"), reason="the faults are those of version 5"),
]

FAULTS = [
    ("llama", "default", "idempotent"),
    ("llama", "default", "reversible"),
    ("llama", "default", "copy and pickle"),
    ("llama", "reentrant", "DDP readiness"),
    ("blt_local_encoder", "reentrant", "gradients present"),
    ("blt_local_encoder", "reentrant", "outputs"),
    ("autoformer", "reentrant", "runs"),
    pytest.param("mllama", "default", "recomputed", marks=pytest.mark.slow),
    pytest.param("mixtral", "reentrant", "gradient values", marks=pytest.mark.slow),
    pytest.param("clvp_decoder", "default", "memory", marks=pytest.mark.slow),
    pytest.param("canary", "default", "buffers", marks=pytest.mark.slow),
    pytest.param("qwen3_vl", "reentrant", "adapters on a frozen base", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("model_type", "mode", "name"), FAULTS)
def test_a_script_shows_the_fault_and_nothing_without_the_flag(model_type, mode, name):
    issue = written(model_type, mode, name)
    assert "lowtide" not in issue.script
    assert shows_here(issue)
    if name not in ("recomputed", "memory"):  # without the flag, these find nothing either
        plain = re.sub(r"^model\.gradient_checkpointing_(en|dis)able\(.*\)$", "", issue.script, flags=re.MULTILINE)
        assert not shows_here(dataclasses.replace(issue, script=plain))


def written(model_type, mode, name):
    tiny_model = zoo.find(model_type)
    checks = [name] if name != "runs" else ["outputs"]
    return write_issue(
        tiny_model, audit(tiny_model.build(), tiny_model.batch(), modes=[mode], checks=checks, dropout=0.1)
    )


@pytest.mark.parametrize(
    ("model_type", "mode", "name"),
    [FAULTS[0], *(pytest.param(*getattr(fault, "values", fault), marks=pytest.mark.slow) for fault in FAULTS[1:])],
)
def test_a_script_shows_the_fault_in_a_process_of_its_own(model_type, mode, name):
    issue = written(model_type, mode, name)
    printed = shows(issue)
    assert printed is not None
    assert issue.error in printed
    assert re.match(r"### \w+ with gradient_checkpointing_enable\(", issue.as_text(printed))


def test_a_script_that_breaks_shows_nothing():
    tiny_model = zoo.find("llama")
    report = AuditReport(model="M", seed=0, blocks={}, checks=[check("idempotent", Verdict.FAIL)])
    issue = write_issue(tiny_model, report)
    assert shows(dataclasses.replace(issue, script="import nothing_of_the_kind")) is None
    assert not shows_here(dataclasses.replace(issue, script="import nothing_of_the_kind"))


def test_the_worst_failure_is_written_up():
    tiny_model = zoo.find("llama")
    failures = [check("idempotent", Verdict.FAIL), check("outputs", Verdict.FAIL, mode="reentrant")]
    report = AuditReport(model="M", seed=0, blocks={}, checks=failures)
    assert "{'use_reentrant': True}): what outputs found" in write_issue(tiny_model, report).title


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (check("outputs", Verdict.PASS), "no failure of M that a script can show: nothing failed"),
        (check("offload", Verdict.FAIL), "no failure of M that a script can show: offload"),
        (check("outputs", Verdict.FAIL, mode="configured"), "leave --engine and --policy out"),
    ],
)
def test_what_cannot_be_written_up(result, message):
    with pytest.raises(CannotAuditError, match=message):
        write_issue(zoo.find("llama"), AuditReport(model="M", seed=0, blocks={}, checks=[result]))
