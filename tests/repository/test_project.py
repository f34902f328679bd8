"""The project's own promises: versions agree, and the code in README, docs and CONTRIBUTING runs."""

from __future__ import annotations

import importlib.util
import json
import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from lowtide import compat
from lowtide.units import format_bytes
from support.pages import CODE
from support.script import run_script

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def constraints() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {pin.name: str(pin.specifier).removeprefix("==") for pin in pins}


def metadata() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def requirements() -> list[Requirement]:
    project = metadata()
    texts = [*project["dependencies"], *(r for extra in project["optional-dependencies"].values() for r in extra)]
    return [Requirement(text) for text in texts]


def test_tested_versions_are_those_that_are_pinned():
    pins = constraints()
    assert {name: str(version) for name, version in compat.TESTED.items()} == {n: pins[n] for n in compat.TESTED}


def test_minimum_versions_are_those_of_the_metadata():
    ranges = {requirement.name: str(requirement.specifier) for requirement in requirements()}
    assert {name: f">={version}" for name, version in compat.MINIMUM.items()} == {n: ranges[n] for n in compat.MINIMUM}


def test_every_requirement_is_pinned_and_admits_its_pin():
    pins = constraints()
    for requirement in requirements():
        if requirement.name != "lowtide":
            assert requirement.specifier.contains(pins[requirement.name]), requirement


def test_the_projects_addresses_stand_in_one_place():
    """A person fills them in; nothing here may guess them, and nothing may repeat them."""
    addresses = metadata()["urls"]
    assert addresses.keys() <= {"Repository", "Documentation"}
    assert all(address.startswith("https://") for address in addresses.values())
    site, makefile = (ROOT / "mkdocs.yml").read_text(), (ROOT / "Makefile").read_text()
    for name, setting in (("Documentation", "site_url"), ("Repository", "repo_url")):
        variable = f"LOWTIDE_{name.upper()}"
        assert f"\n{setting}: !ENV [{variable}, null]" in site
        assert f"{variable}=$(call url,{name})" in makefile
    guesses = re.compile(
        r"(github\.com/[\w-]*lowtide|lowtide[\w-]*\.(io|dev|org)|readthedocs\.\w+/lowtide|lowtide\.readthedocs)"
    )
    repeated = [*addresses.values()]
    for page in (*PAGES, ROOT / "mkdocs.yml", ROOT / "Makefile"):
        text = page.read_text()
        assert not guesses.search(text), page.name
        assert not any(address in text for address in repeated), page.name


def test_the_extras_are_there():
    assert set(metadata()["optional-dependencies"]) == {"hf", "deepspeed", "html", "sim", "dev", "docs"}


NEEDS_TRANSFORMERS_5 = pytest.mark.skipif(
    compat.installed_version("transformers") < Version("5"), reason="plans of transformers models need transformers 5"
)


NEEDS_BITSANDBYTES = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="a 4-bit base needs bitsandbytes"
)


NEEDS_DIFFUSERS = pytest.mark.skipif(
    compat.installed_version("diffusers") is None, reason="make test-vision installs diffusers, and runs this page"
)


NEEDS = {
    "lowtide.plan(": NEEDS_TRANSFORMERS_5,
    "import diffusers": NEEDS_DIFFUSERS,
    "BitsAndBytesConfig": NEEDS_BITSANDBYTES,
}


def python_blocks() -> list:
    return [
        pytest.param(
            block["code"],
            block["output"],
            id=f"{page.relative_to(ROOT)}:{number}",
            marks=[mark for words, mark in NEEDS.items() if words in block["code"]],
        )
        for page in PAGES
        for number, block in enumerate(CODE.finditer(page.read_text()), start=1)
    ]


def comparable(text: str) -> str:
    """The pages show figures of transformers 5: a model of 4.57 has other buffers and bytes."""
    is_of_a_model = "held after forward" in text or "model.layers" in text
    if compat.installed_version("transformers") < Version("5") and is_of_a_model:
        return re.sub(r"\d+(\.\d+)?( [KMG]?i?B)?", "#", text)
    return text


@pytest.mark.parametrize(("code", "output"), python_blocks())
def test_code_in_readme_and_docs_runs_and_prints_what_is_shown(code: str, output: str | None, tmp_path: Path):
    script = tmp_path / "block.py"
    script.write_text(code)
    done = run_script(script)
    assert done.returncode == 0, done.stderr
    if output is not None:
        assert comparable(done.stdout) == comparable(output)


def test_the_readme_has_code_to_run():
    assert any("README" in block.id for block in python_blocks())


def test_the_readme_shows_a_plan_of_the_tables():
    """The same figures as in docs/plans.json, which `make plans` writes."""
    (shown,) = re.findall(
        r"\$ lowtide plan Qwen3-VL-4B --tokens 128k(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL
    )
    plans = json.loads((ROOT / "docs/plans.json").read_text())
    (plan,) = [plan for plan in plans if plan["case"]["model"] == "Qwen3-VL-4B" and plan["case"]["tokens"] == "128k"]
    rows = {candidate["policy"]: candidate for candidate in plan["candidates"]}
    lines = [line.split() for line in shown.splitlines() if line.startswith(("no ", "fits "))]
    assert len(lines) > 4
    for verdict, policy, *figures in lines:
        row = rows[policy]
        host = [format_bytes(row["host_bytes"])] if row["host_bytes"] else []
        told = " ".join([format_bytes(row["device_bytes"]), *host, f"{row['seconds']:.0f} s"])
        assert (verdict == "fits", " ".join(figures)) == (row["fits"], told)
    assert f'lowtide.apply(model, "{plan["best"]}")' in shown


def test_the_readmes_facts_are_those_of_the_records():
    text = (ROOT / "README.md").read_text()
    (zoo,) = (ROOT / "docs/zoo").glob("lowtide-on-transformers-5*.json")
    rows = next(
        case["rows"]
        for case in json.loads((ROOT / "docs/longest.json").read_text())
        if (case["case"]["model"], case["case"]["device"]) == ("Qwen3-8B", "RTX 4090")
    )
    assert [f"{row['tokens']:,}" for row in rows] == ["31,744", "145,408"]
    assert all(f"{row['tokens']:,}" in text for row in rows)
    page = (ROOT / "docs/zoo.md").read_text().partition("## Lowtide's engine on the same models")[2]
    audited = re.search(r"\| audited \| (\d+) \|", page)[1]
    assert f"Of the {audited} architectures" in text
    assert "No check failed." in page
    assert zoo.exists()


def test_the_readme_names_the_tested_versions():
    rows = dict(
        re.findall(r"^\| (\w+) \| (\d[\d.]* \| \d[^|,]*?)(?:,.*)? \|$", (ROOT / "README.md").read_text(), re.MULTILINE)
    )
    assert rows == {name: f"{compat.MINIMUM[name]} | {tested}" for name, tested in compat.TESTED.items()}


def test_pages_install_with_the_constraints():
    """A range that admits a newer torch would pull another build: every install from a checkout names the pins."""
    for page in PAGES:
        for line in page.read_text().splitlines():
            if re.search(r"pip install .*(-e|\[dev)", line):
                assert "-c constraints.txt" in line, f"{page.name}: {line}"
