"""One grammar: every form in which a model can be named means the same to `plan` and to `audit`."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import socket
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING

import pytest
import torch
import transformers
from typer.testing import CliRunner

import lowtide
from lowtide.auditing import CannotAuditError
from lowtide.cli import app
from lowtide.errors import InvalidValueError, LowtideError, PlanError
from lowtide.targets.job import Job
from lowtide.targets.models import build, build_with_batch, load
from lowtide.targets.target import find_target
from lowtide_zoo import audited_model
from lowtide_zoo.audited_model import load_audited
from support import needs_transformers_5, needs_zoo
from support.foreign_warnings import ignore_warnings_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = ignore_warnings_of("transformers", "torch", "huggingface_hub")

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}

FACTORIES = """
import sys
import torch
import transformers
from torch import nn

class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()

def pair():
    return Stack(), (torch.randn(4, 8),)

def options():
    return Stack(), (torch.randn(4, 8),), {"dropout": 0.1}

def bare():
    return Stack()

def llama():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))

def raises():
    raise RuntimeError("no model today")

def nothing():
    return None

def four():
    return Stack(), 1, {}, 2

def exits():
    sys.exit(7)

def extends_the_path():
    sys.path.append("/a/place/of/the/users")
    return pair()
"""


@pytest.fixture
def llama() -> transformers.LlamaForCausalLM:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A current folder with a module of factories that nothing on `sys.path` leads to."""
    (tmp_path / "named_factories.py").write_text(FACTORIES.replace("**SIZES", f"**{SIZES}"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", str(tmp_path))])
    monkeypatch.setenv("COLUMNS", "200")
    importlib.invalidate_caches()
    yield tmp_path
    sys.modules.pop("named_factories", None)


def planned(name: str) -> torch.nn.Module:
    return build(find_target(name), Job(tokens=None if ":" in name else 8))


def audited(name: str) -> torch.nn.Module:
    return load_audited(name).model


def shapes(model: torch.nn.Module) -> dict[str, torch.Size]:
    return {name: parameter.shape for name, parameter in model.named_parameters()}


def run(*arguments: str):
    return CliRunner().invoke(app, arguments)


@needs_transformers_5
class TestEveryFormMeansTheSameToBothVerbs:
    @pytest.mark.parametrize("form", ["./folder", "folder/", "folder/config.json"])
    def test_a_configuration_and_its_folder(self, here: Path, form: str):
        transformers.LlamaConfig(**SIZES).save_pretrained(here / "folder")
        assert find_target(form).name == "folder"
        assert shapes(planned(form)) == shapes(audited(form))
        assert audited(form).lm_head.weight.shape == (64, 32)

    @pytest.mark.parametrize("function", ["pair", "options", "llama"])
    def test_a_factory(self, here: Path, function: str):
        name = f"named_factories:{function}"
        assert shapes(planned(name)) == shapes(audited(name))

    @pytest.mark.parametrize("form", ["Llama-3.2-1B", "meta-llama/Llama-3.2-1B-Instruct", "llama 3.2 1b"])
    def test_a_known_name(self, monkeypatch: pytest.MonkeyPatch, form: str):
        """Its size is that of the makers, for a plan and for an audit: here, too large for one."""
        monkeypatch.setattr(audited_model, "available_memory", lambda: 2**30)
        assert find_target(form).name == "Llama-3.2-1B"
        assert sum(p.numel() for p in planned(form).parameters()) == pytest.approx(1.24e9, rel=0.01)
        assert load_audited(form).note.startswith("Llama-3.2-1B is too large to audit here (1.2B parameters")

    def test_a_model_type(self):
        """A plan takes the sizes that its configuration has by default; an audit the zoo's tiny ones."""
        assert find_target("llama").kind == "model type"
        assert type(planned("llama")) is type(audited("llama"))
        tiny = load_audited("llama")
        assert (tiny.is_tiny, tiny.note, tiny.options) == (True, None, {"dropout": 0.1})

    def test_on_the_command_line(self, here: Path, llama: transformers.LlamaForCausalLM):
        llama.save_pretrained(here / "folder")
        for form in ("folder", "folder/config.json", "named_factories:llama", "named_factories:pair"):
            checks = ("--checks", "gradient values")
            engine = () if "pair" in form else ("--engine", "lowtide")
            result = run("audit", form, *engine, *checks)
            assert "error" not in result.stderr, (form, result.output)
            assert result.exit_code == 0 or "pair" in form, (form, result.output)

    def test_help_says_it_in_the_same_words(self):
        explained = []
        for verb in ("plan", "audit"):
            words = " ".join(run(verb, "--help").output.replace("│", " ").split())
            explained.append(re.search(r"The model: .*? alone\.", words)[0])
        assert explained[0] == explained[1]
        for form in ("Llama-3.1-8B", "org/model", "config.json", "folder", "(llama)", "MODULE:FACTORY"):
            assert form in explained[0]


FORMS = ("Llama-3.1-8B", "org/model", "config.json", "folder", "(llama)", "MODULE:FACTORY")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("lama", "unknown model 'lama': did you mean llama?"),
        ("Qwen3-9B", "unknown model 'Qwen3-9B': did you mean Qwen3-8B?"),
        ("no_such_thing_at_all", "unknown model 'no_such_thing_at_all': give a known name"),
        ("./no_such/config.json", "there is no ./no_such/config.json: give a known name"),
        ("a/b/c", "there is no a/b/c"),
        ("empty", "empty has no config.json"),
        ("module:", "unknown model 'module:'"),
        ("", "the name of the model is empty: give a known name"),
        (r"C:\models\x", r"unknown model 'C:\\models\\x'"),
        ("./no:where", "there is no ./no:where"),
    ],
)
def test_what_is_unknown_is_refused_in_the_same_words(here: Path, name: str, message: str):
    (here / "empty").mkdir()
    said = {}
    for verb, options in (("plan", ("--device", "L40S")), ("audit", ())):
        result = run(verb, name, *options)
        assert result.exit_code == 2
        said[verb] = result.stderr
        assert len(result.stderr.strip().splitlines()) == 1
    assert said["plan"] == said["audit"]
    assert message in said["plan"]
    assert all(form in said["plan"] for form in FORMS)


@pytest.mark.parametrize(
    ("content", "message"), [("{}", "names no model_type"), ("{", "is not JSON"), ("[1]", "names no model_type")]
)
def test_a_file_that_is_no_configuration_is_refused_by_both(here: Path, content: str, message: str):
    (here / "config.json").write_text(content)
    for find in (find_target, load_audited):
        with pytest.raises(InvalidValueError, match=message):
            find("config.json")


@pytest.mark.parametrize("fields", [{"hidden_size": "abc"}, {"num_attention_heads": 0}])
def test_a_configuration_that_cannot_be_built_is_one_message_and_exit_code_2(here: Path, fields: dict[str, object]):
    (here / "config.json").write_text(json.dumps({"model_type": "llama", **SIZES, **fields}))
    for verb, options in (("plan", ("--device", "L40S", "--tokens", "8", "--no-cache")), ("audit", ())):
        result = run(verb, "config.json", *options)
        assert result.exit_code == 2, verb
        assert result.stderr.startswith("error"), verb


def test_a_model_type_that_transformers_does_not_have_is_refused_by_both(here: Path):
    (here / "config.json").write_text('{"model_type": "of_next_year"}')
    for make, kind in ((planned, PlanError), (load_audited, CannotAuditError)):
        with pytest.raises(kind, match="has no model type 'of_next_year'; a newer one may"):
            make("config.json")


def test_a_folder_without_a_configuration_does_not_hide_a_model_type(here: Path):
    (here / "llama").mkdir()
    assert find_target("llama").kind == "model type"


class TestFactories:
    @pytest.mark.parametrize(
        ("function", "message"),
        [
            ("raises", "named_factories:raises could not be run: RuntimeError: no model today"),
            ("missing", "named_factories:missing cannot be imported: .* has no attribute 'missing'"),
            ("nothing", r"must return a torch.nn.Module, \(model, batch\), or .*; it returned NoneType"),
            ("exits", "named_factories:exits could not be run: SystemExit: 7"),
            ("four", "must return .*; it returned tuple"),
        ],
    )
    def test_errors_read_the_same(self, here: Path, function: str, message: str):
        for make, kind in ((planned, PlanError), (load_audited, CannotAuditError)):
            with pytest.raises(kind, match=message):
                make(f"named_factories:{function}")

    def test_a_transformers_model_alone_gets_a_batch_that_fits(self, here: Path):
        audited = load_audited("named_factories:llama")
        assert {"input_ids", "labels"} <= audited.batch.keys()
        assert audited.model(**audited.batch).loss.isfinite()

    def test_another_model_alone_is_refused_by_both(self, here: Path):
        message = r"Stack has no configuration .* a factory that returns \(model, batch\)"
        with pytest.raises(CannotAuditError, match=message):
            load_audited("named_factories:bare")
        with pytest.raises(PlanError, match=message):
            lowtide.plan("named_factories:bare", tokens=8, device="L40S", policy="none", cache=False)

    def test_its_options_are_for_the_audit_alone(self, here: Path):
        assert load_audited("named_factories:options").options == {"dropout": 0.1}
        model, batch = build_with_batch(find_target("named_factories:options"), Job())
        assert shapes(model)
        assert len(batch) == 1


class TestTheImportPath:
    @pytest.mark.parametrize("function", ["pair", "raises", "missing", "nothing", "bare"])
    @pytest.mark.parametrize("make", [planned, audited])
    def test_it_is_as_it_was(self, here: Path, make: Callable[[str], object], function: str):
        before = list(sys.path)
        with contextlib.suppress(LowtideError):
            make(f"named_factories:{function}")
        assert sys.path == before

    def test_the_command_line_leaves_it_too(self, here: Path):
        before = list(sys.path)
        for function in ("pair", "raises"):
            run("audit", f"named_factories:{function}", "--checks", "gradient values")
            assert sys.path == before

    def test_what_the_users_code_adds_stays(self, here: Path):
        before = list(sys.path)
        audited("named_factories:extends_the_path")
        assert sys.path == [*before, "/a/place/of/the/users"]

    @pytest.mark.parametrize("verb", [("audit",), ("plan", "--device", "L40S", "--policy", "none", "--no-cache")])
    def test_a_module_of_the_current_folder_is_found(self, here: Path, verb: tuple[str, ...]):
        """By the installed command, whose first entry of the path is the folder of the command."""
        program = "import sys; sys.path[0] = '/bin'; from lowtide.cli import app; app()"
        command = [sys.executable, "-c", program, verb[0], "named_factories:pair", *verb[1:], "--format", "json"]
        done = subprocess.run(command, cwd=here, capture_output=True, text=True, check=False)
        assert "error" not in done.stderr, done.stderr
        assert json.loads(done.stdout)

    @pytest.mark.parametrize("verb", [("audit", "--checks", "gradients present"), ("plan", "--tokens", "8")])
    def test_a_file_of_the_current_folder_does_not_hide_a_package(self, here: Path, verb: tuple[str, ...]):
        for package in ("transformers", "peft", "scipy", "jinja2"):
            (here / f"{package}.py").write_text(f"raise RuntimeError('the wrong {package} was imported')")
        transformers.LlamaConfig(**SIZES).save_pretrained(here / "folder")
        options = ("--device", "L40S", "--policy", "none", "--no-cache") if verb[0] == "plan" else ("--policy", "none")
        program = "import sys; sys.path[0] = '/bin'; from lowtide.cli import app; app()"
        command = [sys.executable, "-c", program, verb[0], "folder", *verb[1:], *options, "--format", "json"]
        done = subprocess.run(command, cwd=here, capture_output=True, text=True, check=False)
        assert "the wrong" not in done.stderr, done.stderr
        assert json.loads(done.stdout)


class TestWeights:
    def test_those_in_the_folder_are_used(self, here: Path, llama: transformers.LlamaForCausalLM):
        llama.save_pretrained(here / "folder")
        for form in ("folder", "folder/config.json"):
            weight = load_audited(form).model.lm_head.weight
            assert torch.equal(weight.float(), llama.lm_head.weight)

    def test_another_file_of_a_training_run_is_not_taken_for_them(self, here: Path):
        transformers.LlamaConfig(**SIZES).save_pretrained(here / "folder")
        torch.save({}, here / "folder" / "training_args.bin")
        assert load_audited("folder").model.lm_head.weight.std() > 0

    def test_random_ones_come_from_the_seed(self, here: Path):
        transformers.LlamaConfig(**SIZES).save_pretrained(here / "folder")
        first, again, other = (load(find_target("folder"), seed=seed)[0].lm_head.weight for seed in (0, 0, 1))
        assert torch.equal(first, again)
        assert not torch.equal(first, other)

    def test_the_class_is_the_one_that_the_configuration_names(self, here: Path):
        config = transformers.LlamaConfig(**SIZES, architectures=["LlamaForSequenceClassification"], pad_token_id=0)
        config.save_pretrained(here / "folder")
        assert type(load(find_target("folder"))[0]).__name__ == "LlamaForSequenceClassification"

    def test_caches_are_off(self, here: Path):
        transformers.LlamaConfig(**SIZES).save_pretrained(here / "folder")
        assert load_audited("folder").model.config.use_cache is False


class TestTheHub:
    def test_cached_weights_are_used_and_nothing_is_downloaded(
        self, tmp_path: Path, llama: transformers.LlamaForCausalLM
    ):
        snapshot = tmp_path / "hub/models--org--tiny/snapshots/1"
        llama.save_pretrained(snapshot)
        (tmp_path / "hub/models--org--tiny/refs").mkdir()
        (tmp_path / "hub/models--org--tiny/refs/main").write_text("1")
        torch.save(llama.lm_head.weight, tmp_path / "weight.pt")
        program = """
            import socket, sys, torch
            def refuse(*_, **__): raise AssertionError("the network was asked")
            socket.getaddrinfo = refuse
            from lowtide_zoo.audited_model import load_audited
            audited = load_audited("org/tiny")
            print(audited.name, torch.equal(audited.model.lm_head.weight.float(), torch.load(sys.argv[1])))
        """
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", textwrap.dedent(program), str(tmp_path / "weight.pt")],
            env={**os.environ, "HF_HOME": str(tmp_path)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.stdout.strip().endswith("org/tiny True"), done.stderr

    @pytest.mark.parametrize("verb", [("audit", "org/none"), ("plan", "org/none", "--device", "L40S")])
    def test_an_empty_cache_without_a_network_is_one_clear_message(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: tuple[str, ...]
    ):
        def unreachable(*_: object, **__: object) -> None:
            raise socket.gaierror(-2, "Name or service not known")

        monkeypatch.setattr(socket, "getaddrinfo", unreachable)
        monkeypatch.setattr("time.sleep", lambda _: pytest.fail("it should not try again and again"))
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
        result = run(*verb)
        assert result.exit_code == 2
        assert "'org/none' is not a file or folder here, and its configuration could not be fetched from the Hub" in (
            result.stderr
        )
        assert "Give the path of its config.json" in result.stderr


@needs_zoo
class TestAModelThatIsTooLarge:
    @pytest.fixture
    def little_memory(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(audited_model, "available_memory", lambda: 20 * 2**30)

    @pytest.mark.usefixtures("little_memory")
    def test_a_tiny_one_of_its_type_is_audited_and_the_note_says_so(self):
        audited = load_audited("Llama-3.1-8B")
        assert audited.is_tiny
        assert sum(p.numel() for p in audited.model.parameters()) < 1e6
        assert type(audited.model).__name__ == "LlamaForCausalLM"
        assert audited.note == (
            "Llama-3.1-8B is too large to audit here (8.0B parameters, about 120 GiB; 20 GiB are available): a tiny "
            "llama of the same architecture is audited instead"
        )

    @pytest.mark.usefixtures("little_memory")
    @pytest.mark.parametrize("output", ["text", "json", "junit", "html"])
    def test_no_report_hides_it(self, here: Path, output: str):
        result = run("audit", "Llama-3.1-8B", "--checks", "gradient values", "--format", output)
        assert result.exit_code == 0, result.output
        assert "Llama-3.1-8B is too large to audit here" in result.stderr
        assert "LlamaForCausalLM (tiny, in place of Llama-3.1-8B)" in result.stdout

    def test_the_limit_is_four_copies_in_float32(self, here: Path, monkeypatch: pytest.MonkeyPatch):
        transformers.LlamaConfig(**SIZES).save_pretrained(here / "folder")
        needed = 16 * sum(p.numel() for p in load_audited("folder").model.parameters())
        for available, is_tiny in ((needed, False), (needed - 1, True)):
            monkeypatch.setattr(audited_model, "available_memory", lambda available=available: available)
            assert load_audited("folder").is_tiny is is_tiny
