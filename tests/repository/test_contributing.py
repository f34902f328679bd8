"""What contributors are told is so: files and targets exist, hooks and CI run what make runs, notes are valid."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

import lowtide

ROOT = Path(__file__).parents[2]
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = set(re.findall(r"^([a-z][a-z-]*):", MAKEFILE, re.MULTILINE))
FORMS = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("[0-9]*.yml"))
PROSE = [ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", ROOT / "SECURITY.md", *ROOT.glob(".github/**/*.*")]


def commands_of(target: str) -> list[str]:
    (recipe,) = re.findall(rf"^{target}:.*\n((?:\t.*\n)+)", MAKEFILE, re.MULTILINE)
    return [line.strip().replace("$(BIN)", ".venv/bin") for line in recipe.splitlines()]


def paths_in(text: str) -> list[str]:
    """What is set as code and looks like a path of the repository."""
    quoted = re.findall(r"`([\w./-]+)`", text)
    return sorted({name for name in quoted if "/" in name and not name.startswith(("/", "."))})


@pytest.mark.parametrize("path", paths_in(CONTRIBUTING))
def test_a_file_that_contributors_are_sent_to_is_there(path: str):
    assert any((base / path).exists() for base in (ROOT, ROOT / "src/lowtide", ROOT / "tests")), path


def test_the_recipes_name_files():
    assert len(paths_in(CONTRIBUTING)) > 30


@pytest.mark.parametrize("page", PROSE, ids=lambda page: page.name)
def test_a_make_target_that_is_named_is_there(page: Path):
    assert set(re.findall(r"\bmake ([a-z][a-z-]+)`", page.read_text())) <= TARGETS


def test_every_target_is_described_at_the_top_of_the_makefile():
    described = set(re.findall(r"^#   make ([a-z-]+)", MAKEFILE, re.MULTILINE))
    assert described == TARGETS - {"clean"}


def test_hooks_run_what_make_lint_runs():
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert repository["repo"] == "local", "nothing is downloaded"
    assert {hook["language"] for hook in repository["hooks"]} == {"system"}
    hooks = {hook["entry"].removesuffix(" --force-exclude") for hook in repository["hooks"]}
    assert hooks == {re.sub(r" --check| \.$", "", command) for command in commands_of("lint")} | {
        ".venv/bin/ruff check"
    }


def test_the_workflow_runs_make_targets_and_installs_nothing_itself():
    workflow = ROOT / ".github/workflows/checks.yml"
    (job,) = yaml.safe_load(workflow.read_text())["jobs"].values()
    matrix = job["strategy"]["matrix"]
    assert {*matrix["target"], *(row["target"] for row in matrix["include"])} <= TARGETS
    assert [step["run"] for step in job["steps"] if "run" in step] == [
        "make ${{ matrix.target }} ${{ matrix.arguments }}"
    ]
    classifiers = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    versions = {name.rpartition(" ")[2] for name in classifiers if re.search(r"Python :: 3\.\d+$", name)}
    assert set(matrix["python"]) == versions


def test_the_workflow_of_a_gpu_runs_make_targets_and_is_off_by_default():
    workflow = yaml.safe_load((ROOT / ".github/workflows/gpu.yml").read_text())
    assert set(workflow[True]) == {"workflow_dispatch"}, (
        "no push and no pull request starts it (YAML reads `on` as True)"
    )
    (job,) = workflow["jobs"].values()
    assert job["if"] == "vars.GPU_RUNNER == 'on'"
    assert "self-hosted" in job["runs-on"]
    assert set(job["strategy"]["matrix"]["target"]) <= TARGETS
    assert [step["run"] for step in job["steps"] if "run" in step] == ["make ${{ matrix.target }}"]
    assert set(workflow[True]["workflow_dispatch"]["inputs"]) == {"ranks"}, "torch from PyPI is built for CUDA alone"
    assert job["env"]["DEVICE"] == "cuda"


def test_the_container_installs_by_make():
    lines = (ROOT / "docker/Dockerfile.gpu").read_text().splitlines()
    written = {path.rsplit("/", 1)[0] for path in re.findall(r'"(/\S+?\.(?:json|html))"', lines[-1])}
    assert written == {"/out"}
    assert "RUN mkdir /out" in lines, "where nothing is mounted, the record has a place, too"
    assert "COPY . ." in lines
    assert ".venv*" in (ROOT / ".dockerignore").read_text().splitlines()
    assert "RUN make .venv/.dev" in lines
    assert re.search(r"^\.venv/\.dev:", MAKEFILE, re.MULTILINE)


def test_nothing_is_published_before_a_person_turns_it_on():
    for name, last in (("release", "publish"), ("docs", "deploy")):
        workflow = yaml.safe_load((ROOT / f".github/workflows/{name}.yml").read_text())
        assert workflow["permissions"] == {"contents": "read"}
        assert workflow["jobs"][last]["if"] == "vars.PUBLISH == 'true'"
        runs = [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]
        assert {run.removeprefix("make ") for run in runs if run.startswith("make ")} <= TARGETS


@pytest.mark.parametrize(
    "form", sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("[0-9]*.yml")), ids=lambda form: form.stem
)
def test_a_form_asks_for_what_it_takes(form: Path):
    questions = yaml.safe_load(form.read_text())
    fields = {field["id"]: field for field in questions["body"]}
    assert len(fields) == len(questions["body"])
    assert {field["type"] for field in fields.values()} == {"textarea"}
    if "record" in form.stem:
        assert fields["record"]["validations"]["required"]
    elif "feature" not in form.stem:
        assert fields["doctor"]["validations"]["required"]
        assert {"audit", "plan"} & set(fields)


def draft() -> str:
    command = [sys.executable, "-m", "towncrier", "build", "--draft"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_note_is_in_the_next_changelog():
    text = " ".join(draft().split())
    notes = [path for path in (ROOT / "changes").iterdir() if path.name != ".gitkeep"]
    for note in notes:
        assert " ".join(note.read_text().split()) in text, f"{note.name}: is its part one of pyproject's?"
    assert f"## {lowtide.__version__} (" in text


def test_every_public_name_is_used_in_the_typed_file():
    tree = ast.parse((ROOT / "tests/repository/typed/public_api.py").read_text())
    used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert set(lowtide.__all__) <= used
