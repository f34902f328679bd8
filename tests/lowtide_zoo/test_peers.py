"""Other libraries' set-ups as engines: the audit tells which of them are right."""

from __future__ import annotations

import importlib
import os
import sys
import types

import pytest
import torch
import torch.utils.checkpoint
import transformers

import lowtide_zoo as zoo
from bench import peers_page
from lowtide.auditing import Verdict
from lowtide.errors import CannotSetUpError, MissingDependencyError
from lowtide_zoo import peers
from lowtide_zoo.peers import PEERS, audit_peer
from lowtide_zoo.records import read_records
from lowtide_zoo.survey import Engine, run_survey, survey_one
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
    assert record.verdicts == {}, "what is said about the plain model, transformers' survey says"
    assert set(PEERS) < set(Engine)


def test_what_a_library_cannot_set_up_is_said():
    with pytest.raises(CannotSetUpError, match="does not support gradient checkpointing"):
        audit_peer("trl", torch.nn.Linear(4, 4), (torch.ones(2, 4),))
    pytest.importorskip("accelerate")
    with pytest.raises(CannotSetUpError, match="declares no layers for accelerate's plugin to wrap"):
        audit_peer("accelerate", torch.nn.Linear(4, 4), (torch.ones(2, 4),))
    pytest.importorskip("peft")
    with pytest.raises(CannotSetUpError, match="peft, k-bit cannot prepare Identity"):
        audit_peer("peft-kbit", torch.nn.Identity(), (torch.ones(2, 4),))


def test_a_library_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch):
    def missing(name: str) -> None:
        raise ImportError(f"no module named {name}")

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(MissingDependencyError, match="--engine needs accelerate, which cannot be imported here"):
        peers.peer_setups("accelerate")[0].configure(torch.nn.Identity())


@pytest.mark.parametrize(("engine", "package"), [("trl", "trl"), ("unsloth", "unsloth_zoo"), ("axolotl", "axolotl")])
def test_a_survey_with_a_library_that_is_not_installed_does_not_begin(engine, package, tmp_path, monkeypatch):
    monkeypatch.setattr(peers, "is_installed", lambda _: False)
    path = tmp_path / "records.jsonl"
    path.write_text("as it was")
    message = f"--engine {engine} needs {package}, which is not installed: pip install {package}"
    with pytest.raises(MissingDependencyError, match=message):
        run_survey(["llama"], Engine(engine), path)
    assert path.read_text() == "as it was"
    with pytest.raises(MissingDependencyError, match=message):
        audit_peer(engine, *tiny_models.llama())


def test_an_engine_that_only_runs_on_a_gpu_says_so(monkeypatch):
    monkeypatch.setattr(peers, "is_installed", lambda _: True)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    with pytest.raises(CannotSetUpError, match="--engine axolotl needs an accelerator such as a GPU"):
        audit_peer("axolotl", *tiny_models.llama())
    assert [setup.mode for setup in peers.peer_setups("unsloth")] == ["unsloth"]
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    assert [setup.mode for setup in peers.peer_setups("unsloth")] == ["unsloth", "unsloth, smart"]


def test_what_a_library_refuses_is_no_failure_to_run(monkeypatch):
    pytest.importorskip("accelerate")
    build = zoo.TinyModel.build

    def without_layers(tiny_model, seed=0):
        model = build(tiny_model, seed)
        model._no_split_modules = None
        return model

    monkeypatch.setattr(zoo.TinyModel, "build", without_layers)
    record = survey_one("resnet", Engine.ACCELERATE)
    assert (record.status, record.failures) == ("refused", [])
    assert "declares no layers for accelerate's plugin to wrap" in record.why


def test_what_unsloth_patches_is_put_back(monkeypatch, capsys):
    """A module in the place of unsloth_zoo's does what that does."""
    original = torch.utils.checkpoint.checkpoint

    def patch_gradient_checkpointing():
        sys.stdout.write("Unsloth: Patched gradient checkpointing.")
        torch.utils.checkpoint._old_checkpoint = original
        torch.utils.checkpoint.checkpoint = transformers.modeling_utils.checkpoint = patched
        os.environ["UNSLOTH_PATCHED"] = "1"

    def patched(function, *args, use_reentrant=None, **kwargs):
        calls.append(function)
        return original(function, *args, use_reentrant=False, **kwargs)

    calls = []
    zoo_of_theirs = types.ModuleType("unsloth_zoo.gradient_checkpointing")
    zoo_of_theirs.patch_gradient_checkpointing = patch_gradient_checkpointing
    zoo_of_theirs.unpatch_gradient_checkpointing = lambda: None  # as theirs, it may leave something
    monkeypatch.setitem(sys.modules, "unsloth_zoo", types.ModuleType("unsloth_zoo"))
    monkeypatch.setitem(sys.modules, "unsloth_zoo.gradient_checkpointing", zoo_of_theirs)
    monkeypatch.setattr(peers, "is_installed", lambda _: True)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    environment, names = dict(os.environ), set(vars(torch.utils.checkpoint))
    report = audit_peer("unsloth", *tiny_models.llama(), checks=["recomputed", "gradient values"])
    assert report.ok, report
    assert len(calls) == 2, "their function ran, for each layer"
    assert capsys.readouterr().out == "", "a report may go there"
    assert torch.utils.checkpoint.checkpoint is original
    assert transformers.modeling_utils.checkpoint is original
    assert (dict(os.environ), set(vars(torch.utils.checkpoint))) == (environment, names)


def test_the_page_is_that_of_the_records():
    page = peers_page.page(read_records(peers_page.RECORDS))
    assert (peers_page.DOCS / "peers.md").read_text() == page
    assert zoo.model_types()
    assert set(peers_page.ARCHITECTURES) <= set(zoo.model_types())
