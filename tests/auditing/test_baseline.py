"""Failures that an earlier report has are known, and count no more; worse ones do."""

from __future__ import annotations

import dataclasses
import json

import pytest

from lowtide.auditing import AuditReport, CannotAuditError, Grade, Verdict, audit
from lowtide.auditing.baseline import against, read_baseline
from models import engines
from models.engines import loss, net
from support.sample_reports import check


def one(name: str = "gradients present", **known) -> AuditReport:
    return AuditReport(
        model="M", seed=0, blocks={}, checks=[check(name, Verdict.FAIL, **known), check("x", Verdict.PASS)]
    )


def lost(*names: str, count: int | None = None) -> dict:
    return {"lost": list(names), "count": len(names) if count is None else count}


NONE_LEFT = {"error": "NoGradientError: the loss needs no gradient"}


@pytest.mark.parametrize(
    ("before", "now", "ok"),
    [
        (one(evidence=lost("a", "b")), one(evidence=lost("a", "b")), True),
        (one(evidence=lost("a", "b")), one(evidence=lost("b")), True),
        (one(evidence=lost("a", "b")), one(evidence=lost("a", "c")), False),
        (one(evidence=lost("a")), one(evidence=lost("a", "b")), False),
        (one(evidence=lost("a", count=30)), one(evidence=lost("z", count=20)), True),
        (one(evidence=lost("a", count=30)), one(evidence=lost("a", count=31)), False),
        (one(evidence=lost("a")), one(evidence=NONE_LEFT), False),
        (one(evidence=lost("a", count=30)), one(evidence=NONE_LEFT), False),
        (one(evidence=NONE_LEFT), one(evidence=NONE_LEFT | {"error": "NoGradientError: other words"}), True),
        (one(evidence=NONE_LEFT), one(evidence={"error": "TypeError: no"}), False),
        (one(evidence=NONE_LEFT), one(evidence=lost("a")), False),
        (one(evidence=lost("a", "b")), one(), False),
        (one("memory", evidence={"bytes": 1}), one("memory", evidence={"bytes": 2}), True),
        (one(), one(mode="reentrant"), False),
        (one(), one("outputs"), False),
        (one("idempotent"), one("idempotent", escalated=Grade.WRONG), False),
        (one("idempotent", escalated=Grade.WRONG), one("idempotent", escalated=Grade.WRONG), True),
    ],
)
def test_what_is_known(before, now, ok, tmp_path):
    path = tmp_path / "known.json"
    path.write_text(before.to_json())
    report = against(now, read_baseline(path))
    assert report.ok == ok
    assert ("known" in report.conclusion) == ok
    assert ("(known)" in str(report)) == ok


def test_an_audit_against_its_own_report(tmp_path):
    model, batch = net()
    path = tmp_path / "known.json"
    options = {"loss": loss, "checks": ["recomputed", "gradient values", "memory"]}
    path.write_text(audit(model, batch, configure=engines.SkipsALayer(), **options).to_json())
    assert audit(model, batch, configure=engines.SkipsALayer(), baseline=path, **options).ok
    worse = audit(model, batch, configure=engines.DoesNothing(), baseline=path, **options)
    assert [failure.name for failure in worse.counted] == ["recomputed", "memory"], "one has no more of an effect"


def test_a_report_from_before_there_were_grades(tmp_path):
    path = tmp_path / "known.json"
    data = json.loads(one(evidence=lost("a")).to_json())
    for entry in data["checks"]:
        del entry["grade"], entry["known"]
    path.write_text(json.dumps(data))
    assert against(one(evidence=lost("a")), read_baseline(path)).ok


def test_baselines_that_are_none(tmp_path):
    path = tmp_path / "known.json"
    with pytest.raises(CannotAuditError, match="cannot be read: No such file"):
        read_baseline(path)
    for text in ("{", "[]", '{"checks": [{"name": "x"}]}'):
        path.write_text(text)
        with pytest.raises(CannotAuditError, match="is not a report: write one with lowtide audit"):
            read_baseline(path)
    path.write_text(dataclasses.replace(one(), model="Other").to_json())
    with pytest.raises(CannotAuditError, match="is a report about Other, not M"):
        against(one(), read_baseline(path))
