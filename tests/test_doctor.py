"""`lowtide doctor`: facts are there, traps are found when set and only then."""

from __future__ import annotations

import functools
import json
import sys
import types

import pytest
import torch.utils.checkpoint
from packaging.version import Version
from typer.testing import CliRunner

from lowtide import compat
from lowtide import doctor as examined
from lowtide.cli import app
from lowtide.doctor import Fact, Severity, examine


def titles() -> list[str]:
    return [hazard.title for hazard in examine().hazards]


def doctor(*arguments: str):
    return CliRunner().invoke(app, ["doctor", *arguments])


def test_facts_cover_what_a_bug_report_needs():
    facts = {(fact.group, fact.name): fact.value for fact in examine().facts}
    assert facts["software", "torch"].startswith("2.")
    for package in ("transformers", "accelerate", "peft", "trl", "deepspeed"):
        assert ("software", package) in facts
    for name in ("memory", "pinned memory", "disk"):
        assert facts["host", name]
    for name in ("compiler", "ninja", "library"):
        assert facts["emulated device", name]
    assert ("accelerator", "device") in facts


def test_the_accelerator_is_named(sim):
    facts = {(fact.group, fact.name): fact for fact in examine().facts}
    assert facts["accelerator", "device"].value == "1 x sim"
    assert facts["accelerator", "device"].note == "Lowtide emulated accelerator"
    assert facts["accelerator", "memory"].value == "512 MiB"
    assert facts["host", "pinned memory"].value.startswith("works")


def test_an_untouched_torch_is_no_trap():
    assert not [title for title in titles() if "replaced" in title]


def test_a_replaced_checkpoint_function_class_is_found(monkeypatch):
    class Offloading(torch.autograd.Function):
        @staticmethod
        def forward(_ctx, *args):
            return args

    monkeypatch.setattr(torch.utils.checkpoint, "CheckpointFunction", Offloading)
    (hazard,) = [h for h in examine().hazards if "CheckpointFunction" in h.title]
    assert hazard.severity is Severity.WARNING
    assert "Offloading.forward" in hazard.title
    assert "test_doctor.py" in hazard.title
    assert "Non-reentrant checkpointing never calls it" in hazard.detail
    assert hazard.remedy


def test_a_patch_that_copies_names_is_found_all_the_same(monkeypatch):
    original = torch.utils.checkpoint.checkpoint

    @functools.wraps(original)
    def patched(*args, **kwargs):
        return original(*args, **kwargs)

    assert patched.__module__ == "torch.utils.checkpoint"
    monkeypatch.setattr(torch.utils.checkpoint, "checkpoint", patched)
    assert [title for title in titles() if title.startswith("torch.utils.checkpoint.checkpoint was replaced")]


def test_a_reference_that_transformers_keeps_is_looked_at(monkeypatch):
    module = types.ModuleType("transformers.modeling_utils")
    module.checkpoint = lambda *_args: None
    monkeypatch.setitem(sys.modules, "transformers.modeling_utils", module)
    assert [title for title in titles() if title.startswith("transformers.modeling_utils.checkpoint was replaced")]


@pytest.mark.parametrize(("package", "severity", "ok"), [("torch", "error", False), ("transformers", "warning", True)])
def test_old_versions(monkeypatch, package, severity, ok):
    real = compat.installed_version
    monkeypatch.setattr(compat, "installed_version", lambda name: Version("0.1") if name == package else real(name))
    diagnosis = examine()
    (hazard,) = [h for h in diagnosis.hazards if h.title == f"{package} 0.1 is too old"]
    assert hazard.severity == severity
    assert diagnosis.ok is ok
    assert diagnosis.hazards[0] == hazard, "the worst comes first"
    assert doctor().exit_code == (0 if ok else 1)


def software(name: str) -> Fact:
    (fact,) = (fact for fact in examine().facts if (fact.group, fact.name) == ("software", name))
    return fact


@pytest.mark.parametrize(
    ("package", "version", "note"),
    [
        ("torch", "2.13.0+cpu", "tested with 2.12.1 to 2.15.0"),
        ("torch", "2.15.0+cpu", "tested with 2.12.1 to 2.15.0"),
        ("torch", "2.16.1", "newer than what is tested: 2.12.1 to 2.15.0"),
        ("peft", "0.21.2", ""),
        ("peft", "0.18", "tested with 0.21.2"),
        ("peft", "1.0", "newer than what is tested: 0.21.2"),
    ],
)
def test_a_version_is_held_against_the_tested_ones(monkeypatch, package, version, note):
    monkeypatch.setattr(compat, "installed_version", lambda _: Version(version))
    assert software(package).note == note


def test_faults_are_noted_for_the_versions_that_have_them(monkeypatch):
    monkeypatch.setattr(compat, "installed_version", lambda name: Version("1.15.0") if name == "accelerate" else None)
    assert [title for title in titles() if title.startswith("accelerate 1.15.0: FSDP2")]
    monkeypatch.setattr(compat, "installed_version", lambda name: Version("99") if name == "accelerate" else None)
    assert not titles()


def test_wsl_is_noticed(monkeypatch):
    monkeypatch.setattr("platform.release", lambda: "5.15.90.1-microsoft-standard-WSL2")
    assert "WSL2 limits pinned memory" in titles()


def test_cpu_users_hear_of_the_allocator(monkeypatch):
    said = "a process on the CPU seems to hold memory that it has freed"
    monkeypatch.delenv("MALLOC_MMAP_THRESHOLD_", raising=False)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    (hazard,) = [hazard for hazard in examine().hazards if hazard.title == said]
    assert hazard.remedy.startswith("start Python with MALLOC_MMAP_THRESHOLD_=262144")
    assert hazard.severity is Severity.NOTE
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "262144")
    assert said not in titles()
    monkeypatch.delenv("MALLOC_MMAP_THRESHOLD_")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    assert said not in titles()


def test_json_is_for_machines():
    result = doctor("--format", "json")
    report = json.loads(result.output)
    assert report["ok"] is True
    assert {"group", "name", "value", "note"} == set(report["facts"][0])


def test_text_is_for_people():
    result = doctor()
    assert result.exit_code == 0
    assert "emulated device" in result.output
    assert "torch" in result.output


@pytest.mark.parametrize(
    ("severities", "verdict"),
    [
        ([], "Lowtide works here, no known trap."),
        (["note"], "Lowtide works here, but 1 known trap is described above."),
        (["warning", "note"], "Lowtide works here, but 2 known traps are described above."),
        (["error", "note"], "Lowtide cannot work here: trap 0."),
    ],
)
def test_the_last_line_is_the_verdict_and_no_path_is_cut(monkeypatch, severities, verdict):
    path = "/" + "/".join(["a_long_name_of_a_folder"] * 12)
    hazards = [
        examined.Hazard(examined.Severity(severity), f"trap {place}", "What happens.", "what to do")
        for place, severity in enumerate(severities)
    ]
    found = examined.Diagnosis([examined.Fact("host", "disk", "1 GiB free", path)], hazards)
    monkeypatch.setattr(examined, "examine", lambda: found)
    result = doctor()
    assert result.output.splitlines()[-1] == verdict
    assert path in result.output
    assert result.exit_code == ("cannot" in verdict)


def test_a_device_that_does_not_tell_its_memory(sim, monkeypatch):
    def fail():
        raise NotImplementedError("getMemoryInfo is not supported")

    monkeypatch.setattr(torch.accelerator, "get_memory_info", fail)
    memory = next(fact for fact in examined.gather_facts() if (fact.group, fact.name) == ("accelerator", "memory"))
    assert (memory.value, memory.note) == ("not known", "getMemoryInfo is not supported")


def test_a_module_that_patches_on_import_is_caught(tmp_path, monkeypatch):
    (tmp_path / "patches_torch.py").write_text(
        "import torch.utils.checkpoint as c\n"
        "original = c.checkpoint\n"
        "def mine(*args, **kwargs):\n"
        "    return original(*args, **kwargs)\n"
        "c.checkpoint = mine\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(torch.utils.checkpoint, "checkpoint", torch.utils.checkpoint.checkpoint)
    result = doctor("--import", "patches_torch")
    assert result.exit_code == 0
    assert "was replaced by mine" in " ".join(result.output.split())


def test_brackets_in_an_error_are_words(tmp_path, monkeypatch):
    (tmp_path / "lacks_an_extra.py").write_text("raise ImportError(\"pip install 'x[hf]', see [/docs]\")\n")
    monkeypatch.syspath_prepend(tmp_path)
    result = doctor("--import", "lacks_an_extra")
    assert result.exit_code == 2
    assert "ImportError: pip install 'x[hf]', see [/docs]" in result.output


def test_an_import_that_fails_is_one_clear_error():
    result = doctor("--import", "no_such_package")
    assert result.exit_code == 2
    assert "importing no_such_package failed" in result.output
