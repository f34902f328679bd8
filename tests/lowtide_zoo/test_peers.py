"""Other libraries' set-ups as engines: the audit tells which of them are right."""

from __future__ import annotations

import importlib

import pytest
import torch

import lowtide_zoo as zoo
from bench import peers_page
from lowtide.auditing import CannotAuditError, Verdict
from lowtide.errors import MissingDependencyError
from lowtide_zoo import peers
from lowtide_zoo.peers import PEERS, audit_peer
from lowtide_zoo.records import read_records
from lowtide_zoo.survey import Engine, survey_one
from models import tiny as tiny_models
from support import needs_zoo
from support.foreign_warnings import ignore_warnings_of

pytestmark = [needs_zoo, ignore_warnings_of("accelerate", "deepspeed", "peft", "torch", "transformers", "trl")]

CHECKS = ["recomputed", "gradients present", "gradient values", "random state", "DDP readiness", "in-place changes"]


def failed(engine: str, model_type: str = "llama") -> dict[str, set[str]]:
    pytest.importorskip(engine.partition("-")[0])
    model, batch = getattr(tiny_models, model_type)()
    report = audit_peer(engine, model, batch, dropout=0.1, checks=CHECKS)
    assert report.model == type(model).__name__
    assert {check.mode for check in report.checks} == {setup.mode for setup in peers.peer_setups(engine)}
    modes = {check.mode: set() for check in report.checks}
    for failure in report.failures:
        modes[failure.mode].add(failure.name)
    for mode, names in modes.items():
        assert ("recomputed" in names) or report[f"{mode}: recomputed"].verdict is Verdict.PASS
    return modes


def test_trl_is_right():
    assert failed("trl") == {"trl": set(), "trl, selective": set()}


def test_accelerates_plugin_draws_other_dropout_masks():
    assert failed("accelerate") == {"accelerate, FSDP2 plugin": {"gradient values", "random state"}}


def test_deepspeeds_function_is_reentrant():
    assert failed("deepspeed") == {"deepspeed": {"DDP readiness", "in-place changes"}}


def test_adapters_of_a_vision_tower_get_nothing_after_pefts_preparation():
    assert failed("peft-kbit") == {"peft, k-bit": {"DDP readiness"}}
    assert failed("peft-kbit", "qwen3_vl") == {"peft, k-bit": {"recomputed", "gradients present", "DDP readiness"}}


def test_a_survey_of_a_peer():
    pytest.importorskip("trl")
    record = survey_one("resnet", Engine.TRL)
    assert record.status == "no checkpointing"
    assert set(PEERS) < set(Engine)


def test_what_a_library_cannot_set_up_is_said():
    with pytest.raises(CannotAuditError, match="does not support gradient checkpointing"):
        audit_peer("trl", torch.nn.Linear(4, 4), (torch.ones(2, 4),))
    pytest.importorskip("accelerate")
    with pytest.raises(CannotAuditError, match="declares no layers for accelerate's plugin to wrap"):
        audit_peer("accelerate", torch.nn.Linear(4, 4), (torch.ones(2, 4),))
    pytest.importorskip("peft")
    with pytest.raises(CannotAuditError, match="peft, k-bit cannot prepare Identity"):
        audit_peer("peft-kbit", torch.nn.Identity(), (torch.ones(2, 4),))


def test_a_library_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch):
    def missing(name: str) -> None:
        raise ImportError(f"no module named {name}")

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(MissingDependencyError, match="--engine needs accelerate, which cannot be imported here"):
        peers.peer_setups("accelerate")[0].configure(torch.nn.Identity())


def test_the_page_is_that_of_the_records():
    page = peers_page.page(read_records(peers_page.RECORDS))
    assert (peers_page.DOCS / "peers.md").read_text() == page
    assert zoo.model_types()
    assert set(peers_page.ARCHITECTURES) <= set(zoo.model_types())
