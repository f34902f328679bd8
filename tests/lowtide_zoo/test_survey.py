"""A survey: one process per architecture, a line for each, resumable; what fails must fail twice."""

from __future__ import annotations

import collections
import dataclasses
import json
import time

import pytest
import torch
from torch import nn

import lowtide
import lowtide_zoo as zoo
from lowtide.auditing import AuditReport, CannotAuditError, CheckResult, Verdict
from lowtide_zoo import issue, survey
from lowtide_zoo.audited_model import AuditedModel
from lowtide_zoo.page import as_json, as_text
from lowtide_zoo.records import Record, read_records, summarize
from lowtide_zoo.survey import Engine, run_survey, survey_one
from support import needs_zoo
from support.foreign_warnings import ignore_warnings_of

pytestmark = ignore_warnings_of("torch", "transformers")


def record(model_type: str, *failures: str, status="audited", engine="transformers") -> Record:
    found = []
    for failure in failures:
        mode, _, name = failure.partition(": ")
        found.append({"mode": mode, "name": name, "summary": "it is so", "evidence": {}, "remedy": "mend it"})
    verdicts = {"default": {"memory": "pass", "recomputed": "pass"}}
    return Record(
        model_type=model_type,
        engine=engine,
        status=status,
        versions={},
        command=f"lowtide audit {model_type}",
        failures=found,
        verdicts=verdicts,
    )


@needs_zoo
def test_both_engines_on_real_models(tmp_path):
    path = tmp_path / "records.jsonl"
    own = {r.model_type: r for r in run_survey(["mllama", "resnet", "clvp_encoder"], Engine.TRANSFORMERS, path)}
    assert {f["name"] for f in own["mllama"].failures if f["mode"] == "default"} >= {"recomputed"}
    assert own["mllama"].command == "lowtide audit mllama --engine transformers"
    assert own["resnet"].status == "no checkpointing"
    assert own["clvp_encoder"].status == "not built"
    assert "no model class" in own["clvp_encoder"].why
    ours = {r.model_type: r for r in run_survey(["llama", "resnet"], Engine.LOWTIDE, path, resume=True)}
    assert ours["llama"].status == ours["resnet"].status == "audited"
    assert ours["llama"].failures == ours["resnet"].failures == []
    assert set(ours["llama"].verdicts) == {"recompute", "recompute+tile(tokens=8, loss_tokens=8)"}
    assert len(read_records(path)) == 5, "both engines in one file"


def test_a_survey_goes_on_where_it_was_killed(tmp_path):
    path = tmp_path / "records.jsonl"
    path.write_text(record("resnet").to_json() + '\n{"model_type": "vit", "eng')
    seen = []
    run_survey(["resnet", "clvp_encoder"], Engine.TRANSFORMERS, path, resume=True, on_record=seen.append)
    assert [r.model_type for r in seen] == ["clvp_encoder"]
    assert {r.model_type for r in read_records(path)} == {"resnet", "clvp_encoder"}
    run_survey(["clvp_encoder"], Engine.TRANSFORMERS, path, on_record=seen.append)
    assert [r.model_type for r in seen] == ["clvp_encoder", "clvp_encoder"], "without resume it is done again"


def test_a_survey_leaves_the_records_of_the_other_engine_and_of_other_types(tmp_path):
    path = tmp_path / "records.jsonl"
    before = [record("clvp_encoder", engine="lowtide"), record("vit"), record("clvp_encoder")]
    path.write_text("".join(f"{one.to_json()}\n" for one in before))
    (found,) = run_survey(["clvp_encoder"], Engine.TRANSFORMERS, path)
    assert found.status == "not built", "anew"
    assert read_records(path) == [*before[:2], found]
    assert len(path.read_text().splitlines()) == 3


def dies(model_type, engine, sender):
    import os

    os._exit(3)


def hangs(model_type, engine, sender):
    time.sleep(60)


@pytest.mark.parametrize(("work", "status", "why"), [(dies, "failed to run", "code 3"), (hangs, "timed out", "2 s")])
def test_a_process_that_dies_or_hangs_costs_one_architecture(tmp_path, monkeypatch, work, status, why):
    monkeypatch.setattr(survey, "_work", work)
    (found,) = run_survey(["llama"], Engine.LOWTIDE, tmp_path / "r.jsonl", timeout=2)
    assert found.status == status
    assert why in found.why


def report(*failures, mode="default"):
    checks = [CheckResult(name=name, mode=mode, verdict=Verdict.FAIL, summary="s", remedy="r") for name in failures]
    return [AuditReport(model="m", checks=checks, blocks={}, seed=0)]


@needs_zoo
def test_a_failure_that_does_not_come_again_is_not_listed(monkeypatch):
    answers = iter([report("memory", "outputs"), report("memory")])
    monkeypatch.setattr(survey, "audit_tiny_model", lambda *_, **__: next(answers))
    found = survey_one("llama", Engine.TRANSFORMERS)
    assert [f["name"] for f in found.failures] == ["memory"]
    assert [f["name"] for f in found.unconfirmed] == ["outputs"]


@needs_zoo
def test_a_second_audit_that_cannot_run_loses_no_failure(monkeypatch):
    def audit_tiny_model(*_, seed, **__):
        if seed:
            raise CannotAuditError("no other batch")
        return report("memory")

    monkeypatch.setattr(survey, "audit_tiny_model", audit_tiny_model)
    found = survey_one("llama", Engine.TRANSFORMERS)
    assert found.status == "audited"
    assert [f["name"] for f in found.unconfirmed] == ["memory"]
    assert found.why == "what failed could not be confirmed: CannotAuditError: no other batch"


@needs_zoo
@pytest.mark.parametrize(
    ("engine", "mode", "command"),
    [
        (Engine.TRANSFORMERS, "reentrant", "lowtide audit llama --engine transformers"),
        (
            Engine.LOWTIDE,
            "recompute+tile(mlp, tokens=8)",
            "lowtide audit llama --policy 'recompute+tile(mlp, tokens=8)'",
        ),
    ],
)
def test_a_failure_has_the_command_that_repeats_it(monkeypatch, engine, mode, command):
    monkeypatch.setattr(survey, "audit_tiny_model", lambda *_, **__: report("memory", mode=mode))
    assert [f["command"] for f in survey_one("llama", engine).failures] == [command]


@needs_zoo
def test_a_crash_of_our_own_engine_is_a_failure(monkeypatch):
    original = lowtide.apply

    def apply(model, policy):
        if "tile" in policy:
            raise RuntimeError("a tile fell down")
        return original(model, policy)

    monkeypatch.setattr(lowtide, "apply", apply)
    found = survey_one("llama", Engine.LOWTIDE)
    assert [(f["mode"], f["name"]) for f in found.failures] == [("recompute+tile(tokens=8, loss_tokens=8)", "runs")]
    assert "a tile fell down" in found.failures[0]["summary"]
    assert found.verdicts["recompute"]["gradient values"] == "pass", "and the other policy is judged"


@needs_zoo
@pytest.mark.parametrize(
    ("model_type", "why"),
    [
        ("mobilebert", "SilentNoOpError: tile(loss): expected 'cls.predictions.decoder'"),  # only its weight is used
        ("musicgen_decoder", "NoRegionError: tile(loss): the model has 4 heads"),
    ],
)
def test_a_refusal_by_name_is_no_failure(model_type, why):
    tiny_model = zoo.find(model_type)
    accepted, refused = survey._policies(tiny_model.build(0), tiny_model.batch(0))
    assert accepted[0] == "recompute"
    assert not any("loss" in policy for policy in accepted)
    assert any(words.startswith(why) for words in refused.values())


@pytest.mark.parametrize(
    ("policy", "others", "expected"),
    [
        ("recompute+tile(tokens=8)", 2, {"gradient values": "inconclusive", "memory": "fail"}),
        ("recompute+tile(tokens=8)", 0, {"gradient values": "fail", "memory": "fail"}),
        ("recompute", 2, {"gradient values": "fail", "memory": "fail"}),
    ],
)
def test_values_are_not_judged_if_tiles_draw_numbers_of_their_own(policy, others, expected):
    """PhiMoE's router draws in training, whatever the dropout is."""
    checks = [CheckResult(name=name, mode="m", verdict=Verdict.FAIL, summary="s", remedy="r") for name in expected]
    drawn = CheckResult(
        name="random state", mode="m", verdict=Verdict.PASS, summary="s", evidence={"other_draws_in_forward": others}
    )
    assert {c.name: c.verdict.value for c in survey._comparable(policy, [*checks, drawn])[:-1]} == expected


def test_a_fault_of_tiles_is_not_taken_for_random_numbers(monkeypatch):
    """The next layer's attention differs by it, and draws nothing."""
    tiny_models = pytest.importorskip("models.tiny")
    apply = lowtide.apply

    def broken(model, policy):
        applied = apply(model, policy)
        model.model.layers[0].mlp.down_proj.register_forward_hook(lambda *given: given[-1] * 1.1)
        return applied

    monkeypatch.setattr(lowtide, "apply", broken)
    report = survey._audit_policy(*tiny_models.llama(), survey.TILED[0], 0, ["gradient values", "random state"])
    assert [check.name for check in report.failures] == ["gradient values"], report


def test_what_fails_everywhere_is_told_apart():
    records = [record(f"m{i}", "default: memory") for i in range(9)] + [
        record("odd", "default: memory", "default: recomputed")
    ]
    records.append(record("none", status="not built"))
    summary = summarize(records)
    assert summary.by_check == {"default: memory": 10, "default: recomputed": 1}
    assert summary.everywhere == ["default: memory"]
    assert summary.failing == {"odd": ["default: recomputed"]}
    assert summary.by_status == {"audited": 10, "not built": 1}
    text = as_text(records)
    assert "odd: default: recomputed" in text
    assert "m3" not in text
    assert json.loads(as_json(records))["summary"] == dataclasses.asdict(summary)


def test_what_fails_for_the_few_it_applies_to_is_no_fact_of_the_library():
    records = [record(f"m{i}", *(["default: experts"] if i < 5 else [])) for i in range(20)]
    for i, one_of_them in enumerate(records):
        one_of_them.verdicts = {"default": {"experts": "fail" if i < 5 else "not applicable"}}
    assert summarize(records).everywhere == []


def failing(**evidence) -> AuditReport:
    check = CheckResult(name="gradients present", mode="default", verdict=Verdict.FAIL, summary="s", evidence=evidence)
    return AuditReport(model="M", checks=[check], blocks={}, seed=0)


@pytest.mark.parametrize(
    ("first", "second", "kept"),
    [
        ({"lost": ["a", "b"], "count": 2}, {"lost": ["b", "c"], "count": 2}, {"lost": ["b"], "count": 1}),
        ({"lost": ["a"], "count": 1}, {"lost": ["a", "b"], "count": 2}, {"lost": ["a"], "count": 1}),
        ({"different": {"a": 1.0, "b": 2.0}}, {"different": {"b": 3.0}}, {"different": {"b": 2.0}}),
        ({"lost": ["a"], "count": 30}, {"lost": ["b"], "count": 30}, {"lost": ["a"], "count": 30}),
        ({"lost": ["a"], "count": 1}, {"lost": ["b"], "count": 1}, None),
        ({"lost": ["a"], "count": 1}, {"error": "NoGradientError: none"}, None),
        ({"bytes": 1}, {"bytes": 2}, {"bytes": 1}),
    ],
)
def test_what_is_listed_failed_twice_for_the_same_parameters(first, second, kept):
    found = record("m")
    failed = survey.confirm(found, [failing(**first)], [failing(**second)])
    assert [failure["evidence"] for failure in found.failures] == ([] if kept is None else [kept])
    assert [check.evidence for check in failed] == ([] if kept is None else [kept])
    assert len(found.unconfirmed) == (kept is None)


@needs_zoo
def test_what_failed_twice_is_shown_by_a_script_or_said_not_to_be(monkeypatch):
    found = survey_one("llama", Engine.TRANSFORMERS)
    assert found.shown == {"reentrant: DDP readiness": True}
    monkeypatch.setitem(issue._BODIES, "DDP readiness", "pass\n")
    found = survey_one("llama", Engine.TRANSFORMERS)
    assert found.shown == {"reentrant: DDP readiness": False}
    assert "reentrant: DDP readiness (not shown by a script)" in as_text([found])
    assert Record(**json.loads(found.to_json())).shown == found.shown


@needs_zoo
def test_a_model_without_checkpointing_is_judged_by_itself(monkeypatch):
    found = survey_one("resnet", Engine.TRANSFORMERS)
    assert (found.status, found.verdicts) == ("no checkpointing", {"plain model": {"parameters reached": "pass"}})
    build = zoo.TinyModel.build

    def cut(tiny_model, seed=0):
        model = build(tiny_model, seed)
        model.resnet.encoder.register_forward_pre_hook(lambda _, given: (given[0].detach(), *given[1:]))
        return model

    monkeypatch.setattr(zoo.TinyModel, "build", cut)
    found = survey_one("resnet", Engine.TRANSFORMERS)
    assert [(f["mode"], f["name"], f["grade"]) for f in found.failures] == [
        ("plain model", "parameters reached", "wrong")
    ]
    assert found.shown == {"plain model: parameters reached": False}, "the hook is not transformers' own"
    assert summarize([found]).failing == {"resnet": ["plain model: parameters reached (not shown by a script)"]}


def test_numbers_that_are_none_are_json_all_the_same(tmp_path):
    odd = record("odd", "default: memory")
    odd.failures[0]["evidence"] = {"different": {"weight": float("inf")}, "losses": [float("nan"), 1.5]}
    expected = {"different": {"weight": "Infinity"}, "losses": ["NaN", 1.5]}
    path = tmp_path / "r.jsonl"
    path.write_text(odd.to_json())
    (found,) = read_records(path)
    assert found.failures[0]["evidence"] == expected
    for text in (odd.to_json(), found.to_json(), as_json([odd])):
        json.loads(text, parse_constant=pytest.fail)
    assert json.loads(as_json([odd]))["records"][0]["failures"][0]["evidence"] == expected
    path.write_text(json.dumps(dataclasses.asdict(odd)))
    assert read_records(path)[0].failures[0]["evidence"]["different"]["weight"] == float("inf"), "older files"


class Encoded(collections.UserDict):
    """As a tokenizer or a processor returns it."""


def test_a_batch_of_a_tokenizer_goes_to_the_device(sim):
    batch = Encoded(x=torch.ones(2, 4), names=["a", "b"])
    audited = AuditedModel(name="of a test", model=nn.Linear(4, 4), batch=batch).to("sim")
    assert audited.batch["x"].device.type == "sim"
    assert audited.batch["names"] == ["a", "b"]
