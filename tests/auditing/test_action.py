"""The GitHub Action: its steps, run as a runner runs them, with a gh and a pip that write down what they are asked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from support import needs_zoo

ROOT = Path(__file__).parents[2]
ACTION = yaml.safe_load((ROOT / "action.yml").read_text())
INSTALL, AUDIT, COMMENT, EXIT = ACTION["runs"]["steps"]
WORKFLOW = yaml.safe_load((ROOT / ".github/workflows/audit.yml").read_text())


GH = """\
#!/bin/bash
echo "$@" >> "$CALLS"
if [ -n "$READ_ONLY" ]; then
  if [[ "$*" == *--method* || "$READ_ONLY" == all ]]; then echo "HTTP 403" >&2; exit 1; fi
fi
if [[ "$*" != *--method* && -n "$KNOWN" ]]; then printf '%s\\n' $KNOWN; fi
"""
PYTHON = """\
#!/bin/bash
if [ "$1 $2" = "-m pip" ]; then shift 2; echo "pip $@" >> "$CALLS"; exit 0; fi
if [ "$1 $2" = "-c import lowtide" ]; then exit "$MISSING"; fi
exec {python} "$@"
"""


class Runner:
    """Runs steps of the action in bash, as GitHub does."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.calls_file = folder, folder / "calls"
        for name, text in {"gh": GH, "python": PYTHON.format(python=sys.executable)}.items():
            path = folder / "bin" / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
            path.chmod(0o755)
        self.output, self.summary = folder / "output", folder / "summary"
        self.environment = os.environ | {
            "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT / "src"), str(ROOT / "tests"), str(ROOT)]),
            "CALLS": str(self.calls_file),
            "RUNNER_TEMP": str(folder),
            "GITHUB_OUTPUT": str(self.output),
            "GITHUB_STEP_SUMMARY": str(self.summary),
            "GITHUB_ACTION_PATH": str(ROOT),
            "GITHUB_REPOSITORY": "owner/name",
            "READ_ONLY": "",
            "KNOWN": "",
        }

    def __call__(self, step: dict, **environment: str) -> subprocess.CompletedProcess[str]:
        unset = set(step["env"]) - set(environment) - {"GH_TOKEN"}
        assert not unset, "every input is given"
        return subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]],  # noqa: S607  (as GitHub finds it)
            cwd=self.folder,
            env=self.environment | environment,
            capture_output=True,
            text=True,
            check=False,
        )

    @property
    def calls(self) -> list[str]:
        return self.calls_file.read_text().splitlines() if self.calls_file.exists() else []


@pytest.fixture
def run(tmp_path: Path) -> Runner:
    return Runner(tmp_path)


@pytest.mark.parametrize(
    ("missing", "install", "expected"),
    [
        ("1", "", [f"pip install {ROOT}"]),
        ("1", ". extra", [f"pip install {ROOT}", "pip install . extra"]),
        ("0", ".", ["pip install ."]),
        ("0", "", []),
    ],
)
def test_lowtide_is_installed_from_the_action_itself(run: Runner, missing: str, install: str, expected: list[str]):
    assert run(INSTALL, INSTALL=install, MISSING=missing).returncode == 0
    assert run.calls == expected


def commented(run: Runner, **environment: str) -> subprocess.CompletedProcess[str]:
    (run.folder / "comment.md").write_text("<!-- lowtide audit of m:f -->\n**ok**\n")
    return run(COMMENT, FOLDER=str(run.folder), NUMBER="7", **environment)


LIST = "api --paginate repos/owner/name/issues/7/comments --jq .[] | select(.body | startswith(env.MARK)) | .id"


def test_a_comment_is_written_once(run: Runner):
    done = commented(run)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    body = f"-F body=@{run.folder}/comment.md"
    assert run.calls == [LIST, f"api --method POST repos/owner/name/issues/7/comments {body}"]
    run.calls_file.unlink()
    assert commented(run, KNOWN="41 52").returncode == 0
    assert run.calls == [LIST, f"api --method PATCH repos/owner/name/issues/comments/41 {body}"]


@pytest.mark.parametrize("read_only", ["writes", "all"])
@pytest.mark.parametrize("known", ["", "41"])
def test_a_token_that_may_not_write_is_a_warning(run: Runner, read_only: str, known: str):
    """That of a pull request from a fork is read-only."""
    done = commented(run, READ_ONLY=read_only, KNOWN=known)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("::warning title=lowtide audit::The grades are in the job's summary")
    assert len(run.calls) == (2 if read_only == "writes" else 1)


def test_without_a_report_there_is_no_comment(run: Runner):
    assert run(COMMENT, FOLDER=str(run.folder), NUMBER="7").returncode == 0
    assert run.calls == []


@pytest.mark.parametrize("code", ["0", "1", "2"])
def test_the_job_ends_as_the_audit_did(run: Runner, code: str):
    assert run(EXIT, CODE=code).returncode == int(code)


@needs_zoo
def test_the_workflow_audits_a_model_of_this_repository(run: Runner):
    (uses,) = [step for step in WORKFLOW["jobs"]["audit"]["steps"] if step.get("uses") == "./"]
    given = {name: value for name, value in uses["with"].items() if name != "install"}
    assert set(given) <= set(ACTION["inputs"])
    inputs = {name: given.get(name, ACTION["inputs"][name].get("default", "")) for name in ACTION["inputs"]}
    names = {"TARGET": "target", "FAIL_ON": "fail-on", "BASELINE": "baseline", "POLICY": "policy"}
    done = run(AUDIT, MISSING="0", **{variable: inputs[name] for variable, name in names.items()})
    assert done.returncode == 0, done.stderr
    folder = run.folder / "lowtide-audit"
    assert run.output.read_text() == f"folder={folder}\ncode=0\n"
    assert "**ok**: `LlamaForCausalLM`: Gradients are right, and no check failed." in run.summary.read_text()
    assert json.loads((folder / "badge.json").read_text())["message"] == "gradients right"
    done = run(AUDIT, TARGET="nowhere:nothing", FAIL_ON="", BASELINE="", POLICY="", MISSING="0")
    assert done.returncode == 0, "the last step ends the job"
    assert run.output.read_text().endswith("code=2\n")


def test_the_action_audits_once_and_writes_annotations_comment_and_badge(tmp_path: Path):
    (tmp_path / "factory.py").write_text(
        "from models import engines\n"
        "def faulty():\n"
        "    model, batch = engines.net()\n"
        "    checks = ['recomputed', 'gradient values']\n"
        "    return model, batch, {'configure': engines.SkipsALayer(), 'loss': engines.loss, 'checks': checks}\n"
    )
    paths = [str(tmp_path), str(ROOT / "tests"), str(ROOT / "src")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}

    def act(*options: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(ROOT / "tools" / "audit_action.py"), str(tmp_path), "factory:faulty", *options]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    done = act()
    assert done.returncode == 1, done.stderr
    assert [line.split("::")[1].split()[0] for line in done.stdout.splitlines()] == ["error", "notice"]
    assert done.stdout.startswith("::error title=Net [configured] recomputed (no-effect)::")
    comment = (tmp_path / "comment.md").read_text().splitlines()
    assert comment[0] == "<!-- lowtide audit of factory:faulty -->"
    assert comment[1] == "**not ok**: `Net`: Gradients are right; layers is not wholly recomputed."
    assert json.loads((tmp_path / "badge.json").read_text())["message"] == "no-effect"
    (tmp_path / "report.json").rename(tmp_path / "known.json")
    assert act("--baseline", str(tmp_path / "known.json")).returncode == 0
    assert json.loads((tmp_path / "badge.json").read_text())["message"] == "gradients right"


def test_the_action_passes_every_input_on():
    text, inputs = (ROOT / "action.yml").read_text(), list(ACTION["inputs"])
    assert inputs == ["target", "fail-on", "baseline", "policy", "comment", "install", "token"]
    assert [name for name in inputs if f"inputs.{name}" not in text] == []
