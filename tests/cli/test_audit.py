"""`lowtide audit`: targets, formats, exit codes."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ET

import pytest
import torch
from typer.testing import CliRunner

import lowtide
import lowtide_zoo.issue
import lowtide_zoo.peers
import lowtide_zoo.survey
from lowtide.auditing import CannotAuditError
from lowtide.cli import app
from lowtide.errors import OffloadError
from lowtide_zoo.audited_model import load_audited
from lowtide_zoo.records import Record
from lowtide_zoo.subjects import subjects_of
from support import needs_zoo
from support.foreign_warnings import ignore_warnings_of

pytestmark = ignore_warnings_of("torch", "transformers")

FACTORIES = """
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

class Net(nn.Module):
    def __init__(self, keep_random_state=True):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.5), nn.Tanh(), nn.Linear(32, 8)) for _ in range(3)
        )
        self.keep_random_state = keep_random_state

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False, preserve_rng_state=self.keep_random_state)
        return x

def right():
    return Net(), (torch.randn(4, 8),)

def wrong():
    return Net(keep_random_state=False), (torch.randn(4, 8),), {"loss": lambda y: y.square().sum()}

def raises():
    raise RuntimeError("no model today")

def untidy():
    class Undo:
        def remove(self):
            pass

    def configure(model):
        for layer in model.layers:
            layer.register_forward_hook(lambda *_: None)
        return Undo()

    return Net(), (torch.randn(4, 8),), {"configure": configure, "checks": ["gradient values", "reversible"]}

def vacuous():
    return Net(), (torch.randn(4, 8),), {"loss": lambda y: y.square().sum() * 0}

def empty():
    return nn.Tanh(), (torch.randn(4, 8),)

def misspelt():
    return Net(), (torch.randn(4, 8),), {"dropuot": 0.1}

def listed():
    return Net(), (torch.randn(4, 8),), ["dropout"]

def refused():
    import lowtide
    return Net(), (torch.randn(4, 8),), {"configure": lambda model: lowtide.apply(model, "recompule")}

def misfit():
    return Net(), (torch.randn(4, 9),)
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    (tmp_path / "factories_of_a_test.py").write_text(FACTORIES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments):
        return CliRunner().invoke(app, ["audit", *arguments])

    return run


def test_a_model_that_checkpoints_by_itself(run):
    result = run("factories_of_a_test:right")
    assert result.exit_code == 0, result.output
    assert "3 blocks ran again in backward: layers x3" in result.output
    assert "gradient values: bit-identical" in result.output


def test_a_failure_is_exit_code_one_with_evidence_and_remedy(run):
    result = run("factories_of_a_test:wrong")
    assert result.exit_code == 1
    assert "wrong     random state" in result.output
    assert "preserve_rng_state=True" in result.output


@pytest.mark.parametrize(("options", "code"), [((), 0), (("--fail-on", "untidy"), 1), (("--fail-on", "wrong"), 0)])
def test_the_exit_code_goes_by_the_grade(run, options, code):
    result = run("factories_of_a_test:untidy", *options)
    assert result.exit_code == code, result.output
    assert result.output.startswith(
        "Net: Gradients are right; untidy: switched off, it leaves something behind\n[configured]\n  ok        gradient"
    )
    assert "  untidy    reversible: switched off, " in result.output
    assert "3 hooks are left" in result.output


def test_known_failures_do_not_count(run):
    assert run("factories_of_a_test:wrong", "--format", "json", "-o", "known.json").exit_code == 1
    result = run("factories_of_a_test:wrong", "--baseline", "known.json")
    assert result.exit_code == 0, result.output
    assert "2 known failures" in result.output
    assert run("factories_of_a_test:wrong", "--baseline", "nothing.json").exit_code == 2


def test_the_text_is_that_of_print(run):
    factories = __import__("factories_of_a_test")
    model, batch, options = factories.wrong()
    assert run("factories_of_a_test:wrong").stdout.strip() == str(lowtide.audit(model, batch, **options))


def test_a_factory_that_fails_shows_its_traceback_if_asked(run):
    plain = CliRunner().invoke(app, ["audit", "factories_of_a_test:raises"])
    assert plain.stderr.strip().endswith("no model today (lowtide -v shows where)")
    verbose = CliRunner().invoke(app, ["-v", "audit", "factories_of_a_test:raises"])
    assert verbose.exit_code == 2
    assert "in raises" in verbose.stderr
    assert 'raise RuntimeError("no model today")' in verbose.stderr


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("factories_of_a_test:raises", "no model today"),
        ("factories_of_a_test:nothing", "cannot be imported: module 'factories_of_a_test' has no attribute"),
        ("factories_of_a_test:empty", "no parameter that needs a gradient"),
        ("factories_of_a_test:misfit", "does the batch fit the model?"),
        ("no_such_architecture", "unknown model 'no_such_architecture'"),
        ("lama", "did you mean llama?"),
        (".", "no config.json"),
        ("factories_of_a_test:misspelt", "unknown lowtide.audit keyword 'dropuot': did you mean 'dropout'?"),
        ("factories_of_a_test:listed", "options as a dict, not as list"),
        ("factories_of_a_test:refused", "did you mean 'recompute'?"),
        pytest.param("clvp_encoder", "no model class of its own", marks=needs_zoo),
    ],
)
def test_what_cannot_be_run_is_exit_code_two_with_one_message(run, target, message):
    result = run(target)
    assert result.exit_code == 2
    assert message in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "one target, or --zoo"),
        (("llama", "--zoo"), "one target, or --zoo"),
        pytest.param(("llama", "--checks", "speed"), "choose from", marks=needs_zoo),
        pytest.param(("llama", "--policy", "recompule"), "recompule", marks=needs_zoo),
        pytest.param(
            ("llama", "--policy", "recompute", "--engine", "transformers"), "--policy is for", marks=needs_zoo
        ),
        (("--zoo", "--family", "no_such*"), "fits 'no_such*'"),
        (("--zoo", "--format", "junit"), "text, json or html"),
        (("--zoo", "--policy", "recompute+offload"), "--policy is for one target"),
        (("--zoo", "--checks", "memory"), "--checks is for one target"),
        (("--zoo", "--seed", "0"), "--seed is for one target"),
        (("--zoo", "--device", "cuda"), "--device is for one target"),
        (("factories_of_a_test:right", "--fail-on", "bad"), "unknown grade 'bad': choose from wrong"),
        (("--zoo", "--fail-on", "bad"), "unknown grade 'bad': choose from wrong"),
        (("--zoo", "--baseline", "known.json"), "--baseline is for one target"),
        (("factories_of_a_test:right", "--family", "qwen*"), "--family goes with --zoo"),
        (("factories_of_a_test:right", "--resume"), "--resume goes with --zoo"),
        (("factories_of_a_test:right", "--records", "r.jsonl"), "--records goes with --zoo"),
        (("factories_of_a_test:right", "--workers", "2"), "--workers goes with --zoo"),
        (("factories_of_a_test:right", "--timeout", "60"), "--timeout goes with --zoo"),
        (("factories_of_a_test:raises", "--device", "abacus"), "--device abacus cannot be used here"),
        pytest.param(
            ("factories_of_a_test:raises", "--device", "cuda"),
            "--device cuda cannot be used here",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is one"),
        ),
        (("factories_of_a_test:raises", "-o", "no/folder/x"), "there is no directory no/folder"),
        (("factories_of_a_test:raises", "-o", "."), ". is a directory"),
        (("--zoo", "--records", "no/folder/x"), "there is no directory no/folder"),
    ],
)
def test_options_that_do_not_fit(run, options, message):
    result = run(*options)
    assert result.exit_code == 2, result.exception
    assert message in result.output
    assert "remedy" not in result.output


@needs_zoo
@pytest.mark.parametrize("output", ["text", "json"])
def test_what_lowtide_refuses_is_no_failed_proof(run, monkeypatch, output):
    def refuse(model, policy):
        raise OffloadError("its activations are in host memory already. Use 'recompute'")

    monkeypatch.setattr(lowtide, "apply", refuse)
    result = run("llama", "--policy", "recompute+offload", "--format", output)
    assert result.exit_code == 2, result.output
    assert result.stderr.splitlines()[-1] == "error its activations are in host memory already. Use 'recompute'"
    assert not result.stdout


@needs_zoo
def test_a_policy_that_is_not_active_is_a_failed_proof(run):
    result = run("mobilebert", "--policy", "recompute+tile(loss, loss_tokens=8)", "--format", "json")
    assert result.exit_code == 1, result.output
    _, check = json.loads(result.stdout)["checks"]
    assert (check["name"], check["verdict"], check["grade"]) == ("runs", "fail", "wrong")
    assert "SilentNoOpError: tile(loss): expected 'cls.predictions.decoder'" in check["summary"]


@needs_zoo
def test_the_policy_of_the_help_page_works_without_a_gpu(run):
    words = " ".join(run("--help").output.replace("│", " ").split())
    policy = re.search(r"with this policy, e\.g\. (\S+)\.", words)[1]
    result = run("llama", "--policy", policy, "--checks", "recomputed,gradient values")
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("arguments", [("--zoo",), ("llama",), ("folder/",)])
def test_without_transformers_one_message_says_what_to_install(run, tmp_path, monkeypatch, arguments):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "config.json").write_text('{"model_type": "llama"}')
    for module in ("transformers", "transformers.models.auto.configuration_auto"):
        monkeypatch.setitem(sys.modules, module, None)
    result = run(*arguments)
    assert result.exit_code == 2, result.exception
    assert "needs transformers" in result.output
    assert "pip install 'lowtide[hf]'" in result.output


def test_weights_that_do_not_fit_are_one_message(run, tmp_path):
    tiny_llama().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "intermediate_size": 48}))
    result = run(".")
    assert result.exit_code == 2, result.exception
    assert "could not be loaded: RuntimeError" in result.output
    assert "mismatch" in result.output


def test_nothing_proven_is_not_called_zero_failures(run):
    result = run("factories_of_a_test:right", "--checks", "experts")
    assert result.exit_code == 1
    assert "No check passed: nothing is proven" in result.output
    assert "0 of" not in result.output


def test_gradients_that_are_all_zero_are_no_success(run):
    result = run("factories_of_a_test:vacuous")
    assert result.exit_code == 1
    assert "remedy: give a batch with labels that are not all ignored" in result.output
    assert "the gradients are not proven right" in result.output


@needs_zoo
@pytest.mark.parametrize(
    ("policy", "dropout"),
    [("recompute", 0.1), ("recompute+tile(tokens=8)", 0.0), ("recompute; *.0: recompute+tile(mlp, tokens=8)", 0.0)],
)
def test_tiles_of_the_zoo_are_judged_without_dropout(run, monkeypatch, policy, dropout):
    """As the survey does it, whose failures the command repeats: a tile draws masks of its own."""
    seen = []

    def audit(model, batch, **options):
        seen.append(options["dropout"])
        raise CannotAuditError("not now")

    monkeypatch.setattr(lowtide, "audit", audit)
    run("llama", "--policy", policy)
    assert seen == [dropout]


@pytest.mark.parametrize(
    ("statuses", "code"),
    [
        (["audited", "refused", "not built", "no checkpointing"], 0),
        (["audited", "failed to run"], 2),
        (["audited", "timed out"], 2),
    ],
)
@pytest.mark.parametrize("fails", [False, True])
def test_exit_codes_of_the_zoo(run, tmp_path, monkeypatch, statuses, code, fails):
    def run_survey(names, engine, path, **_):
        return [one(name.model_type, status) for name, status in zip(names, statuses, strict=False)]

    def one(name, status):
        failures = [{"mode": "default", "name": "memory"}] if fails and status == "audited" else []
        return Record(model_type=name, engine="lowtide", status=status, versions={}, command="", failures=failures)

    monkeypatch.setattr(lowtide_zoo.survey, "run_survey", run_survey)
    result = run("--zoo", "--engine", "lowtide", "-o", "zoo.txt")
    assert result.exit_code == (1 if fails else code), result.output
    assert "written to zoo.txt" in result.stderr
    assert "model types, engine lowtide" in (tmp_path / "zoo.txt").read_text()


def test_the_bar_of_a_resumed_survey_counts_what_is_left(run, tmp_path, monkeypatch):
    done = Record(model_type="qwen2", engine="lowtide", status="audited", versions={}, command="")
    other = Record(model_type="qwen3", engine="transformers", status="audited", versions={}, command="")
    (tmp_path / "r.jsonl").write_text(f"{done.to_json()}\n{other.to_json()}\n")
    totals = []

    def progress_bar(console, *, total, **_):
        totals.append(total)
        return contextlib.nullcontext(lambda *_: None)

    monkeypatch.setattr(sys.modules["lowtide.cli.audit"], "progress_bar", progress_bar)
    monkeypatch.setattr(lowtide_zoo.survey, "run_survey", lambda *_, **__: [])
    for more in ((), ("--resume",)):
        run("--zoo", "--engine", "lowtide", "--family", "qwen[23]", "--records", "r.jsonl", *more)
    assert totals == [2, 1]


def test_machine_readable_formats(run, tmp_path):
    report = json.loads(run("factories_of_a_test:right", "--format", "json").stdout)
    assert report["ok"]
    assert {"name", "verdict", "evidence", "remedy"} <= report["checks"][0].keys()
    junit = ET.fromstring(run("factories_of_a_test:wrong", "--format", "junit").stdout)  # noqa: S314  (our own)
    assert junit.findall(".//failure")
    assert "::error" in run("factories_of_a_test:wrong", "--format", "github").stdout
    assert run("factories_of_a_test:right", "--format", "html", "-o", "report.html").exit_code == 0
    assert "<html" in (tmp_path / "report.html").read_text()


@needs_zoo
def test_an_architecture_under_our_policy(run):
    result = run(
        "llama", "--policy", "recompute+tile(tokens=8, loss_tokens=8)", "--checks", "recomputed,gradient values"
    )
    assert result.exit_code == 0, result.output
    assert "model.layers x2" in result.output


def tiny_llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    )
    return LlamaForCausalLM(config)


def test_the_seed_is_that_of_a_folders_random_weights(tmp_path):
    model = tiny_llama()
    model.config.architectures = ["LlamaForCausalLM"]
    model.config.save_pretrained(tmp_path)
    state = torch.get_rng_state()
    one, same, other = (load_audited(str(tmp_path), seed=seed).model.lm_head.weight for seed in (0, 0, 1))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_model_folder(run, tmp_path):
    tiny_llama().save_pretrained(tmp_path / "llama")
    result = run("llama/", "--engine", "lowtide", "--checks", "recomputed,gradient values")
    assert result.exit_code == 0, result.output
    assert "LlamaForCausalLM" in result.output


@needs_zoo
def test_the_classes_and_variants_of_a_family(run, tmp_path, monkeypatch):
    """What a survey is given to audit, and what it writes down about itself."""
    asked = []

    def run_survey(subjects, engine, path, **_):
        asked.extend(subjects)
        return [
            Record(
                model_type=subject.model_type,
                subject_class=subject.model_class,
                variant=subject.variant,
                engine=engine.value,
                status="audited",
                versions={},
                command="",
            )
            for subject in subjects
        ]

    monkeypatch.setattr(lowtide_zoo.survey, "run_survey", run_survey)
    monkeypatch.setattr(lowtide_zoo.survey, "find_subjects", found_here)
    result = run("--zoo", "--family", "blip", "--every-class", "--variants", "--format", "json", "-o", "zoo.json")
    assert result.exit_code == 0, result.output
    names = {subject.name for subject in asked}
    assert names >= {"blip BlipModel", "blip BlipForConditionalGeneration"}
    data = json.loads((tmp_path / "zoo.json").read_text())["summary"]
    assert (data["total"], data["pass"]["subjects"], data["pass"]["workers"]) == (len(asked), len(asked), 2)
    assert data["pass"]["seconds"] > 0


def found_here(model_types, *, every_class, variants, workers, on_type):
    """In this process: a server of processes would be shared with other tests."""
    assert workers == 2
    found = [subjects_of(name, every_class=every_class, variants=variants) for name in model_types]
    for name in model_types:
        on_type(name)
    return [subject for subjects in found for subject in subjects]


def test_a_survey_with_a_library_that_is_missing(run, tmp_path, monkeypatch):
    monkeypatch.setattr(lowtide_zoo.peers, "is_installed", lambda _: False)
    result = run("--zoo", "--engine", "trl", "--family", "llama", "--records", "r.jsonl")
    assert result.exit_code == 2
    assert "--engine trl needs trl, which is not installed: pip install trl" in result.stderr
    assert not (tmp_path / "r.jsonl").exists()


@needs_zoo
def test_an_issue_is_printed_with_what_its_script_printed(run, monkeypatch):
    monkeypatch.setattr(lowtide_zoo.issue, "shows", lambda _: "hooks: 0, 1, 2")
    result = run("llama", "--format", "issue", "--checks", "idempotent", "--fail-on", "untidy")
    assert result.exit_code == 1, result.output
    assert result.stdout.startswith("### LlamaForCausalLM with gradient_checkpointing_enable(")
    assert "hooks: 0, 1, 2" in result.stdout
    assert "import torch\n" in result.stdout
    monkeypatch.setattr(lowtide_zoo.issue, "shows", lambda _: None)
    result = run("llama", "--format", "issue", "--checks", "idempotent")
    assert result.exit_code == 2
    assert "the script does not show this failure" in result.stderr
    assert result.stdout == ""


def test_an_issue_is_about_a_model_type(run):
    result = run("factories_of_a_test:wrong", "--format", "issue")
    assert result.exit_code == 2
    assert "--format issue writes a script from a model type" in result.stderr


def test_a_corner_of_the_zoo(tmp_path):
    """In a process of its own, as a user has it: a survey starts a server that other tests would share."""
    command = [sys.executable, "-W", "ignore", "-m", "lowtide", "audit", "--zoo", "--family", "xlm"]
    options = ["--engine", "lowtide", "--workers", "1", "--records", "r.jsonl"]
    done = subprocess.run([*command, *options], cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 model types, engine lowtide" in done.stdout
    assert json.loads((tmp_path / "r.jsonl").read_text())["model_type"] == "xlm"
