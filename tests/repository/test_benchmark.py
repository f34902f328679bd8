"""The benchmark: its page is what the stored results say, counts repeat, and what differs is told."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from types import MappingProxyType

import pytest

pytest.importorskip("transformers", reason="the sections train its models")

from bench import comparing, page
from bench.ahead import ahead
from bench.apart import CannotRunError, apart
from bench.figures import Figure, Result, count, ratio, seconds, verdict
from bench.section import NAMES, Rivalry, section, stored

ROOT = Path(__file__).parents[2]


def one(figure: Figure) -> Result:
    return Result({"size": 1}, {"row": {"figure": figure}})


def test_the_pages_show_the_stored_results():
    for path, text in page.pages().items():
        assert path.read_text() == text, f"python -m bench.page writes another {path.name}"


def test_the_reason_for_our_own_loss_is_what_is_stored():
    rows = stored("loss").rows
    theirs, ours = (
        rows[f"{name}, Liger's chunks"]["error"].value for name in ("torch F.linear_cross_entropy", "Lowtide")
    )
    line = next(line for line in (ROOT / "docs/tiling.md").read_text().splitlines() if "bfloat16, chunks of" in line)
    assert re.findall(r"([\d.]+) % off", line) == [str(theirs), str(ours)]


def test_every_plot_is_well_formed_and_on_the_page():
    drawn = [path for path in page.pages() if path.suffix == ".svg"]
    assert len(drawn) >= 7
    for path in drawn:
        assert ET.parse(path).getroot().tag == "{http://www.w3.org/2000/svg}svg"  # noqa: S314  (our own file)
        assert f"img/{path.name}" in (page.DOCS / "benchmark.md").read_text()


@pytest.mark.parametrize("name", NAMES)
def test_results_survive_their_file(name):
    result = stored(name)
    assert result.rows
    read = getattr(section(name), "from_text", Result.from_text)
    assert read(result.as_json()) == result


def skip_unless_measured_with_what_is_installed(name: str) -> None:
    for package, version in stored(name).environment["versions"].items():
        if package in ("torch", "transformers") and importlib.metadata.version(package) != version:
            pytest.skip(f"the stored counts are those of {package} {version}")


MEASURE = """
import json, pathlib, sys
from bench.section import section
for name, rows in json.loads(sys.argv[1]).items():
    result = section(name).measure(lambda *_: None, tuple(rows))
    pathlib.Path(sys.argv[2], name).write_text(result.as_json())
"""


def test_counted_bytes_and_virtual_time_are_those_stored(tmp_path):
    """A few rows stand for all. In a process of its own: it forks, which one that has run a backward may not."""
    chosen = {"freed": ["Lowtide recompute+offload"], "virtual_clock": ["transformers' flag, offload=True"]}
    skip_unless_measured_with_what_is_installed("freed")
    command = [sys.executable, "-W", "ignore", "-c", MEASURE, json.dumps(chosen), str(tmp_path)]
    subprocess.run(command, check=True, cwd=ROOT)
    for name, rows in chosen.items():
        before = stored(name)
        before.rows = {row: before.rows[row] for row in rows}
        assert comparing.differences(before, Result.from_text((tmp_path / name).read_text())) == []


COUNT = """
import json, sys
from bench.sections import selective
row = sys.argv[1]
figures = selective.on_device(row) | selective.counts(selective.tiny_steps()[row], selective.TINY)
print(json.dumps({name: figure.value for name, figure in figures.items()}))
"""


def test_kept_attention_is_counted_as_stored():
    row = "Lowtide recompute(keep=attention)"
    skip_unless_measured_with_what_is_installed("selective")
    command = [sys.executable, "-W", "ignore", "-c", COUNT, row]
    found = json.loads(subprocess.run(command, check=True, cwd=ROOT, capture_output=True, text=True).stdout)
    assert len(found) == 7
    assert found == {name: stored("selective").rows[row][name].value for name in found}
    layers = section("selective").TINY_LAYERS
    assert found["attention, tiny layers"] == layers, "computed once, where recompute does it twice"
    assert stored("selective").rows["Lowtide recompute"]["attention, tiny layers"].value == 2 * layers


def test_a_count_that_changed_is_a_failure_and_a_ratio_has_a_band():
    assert not comparing.differences(one(count(3)), one(count(3)))
    assert [d.is_failure for d in comparing.differences(one(count(3)), one(count(4)))] == [True]
    assert [d.is_failure for d in comparing.differences(one(verdict("right")), one(verdict("wrong")))] == [True]
    assert not comparing.differences(one(ratio([1.0, 1.1])), one(ratio([1.05, 1.15])))
    assert [d.is_failure for d in comparing.differences(one(ratio([1.0, 1.1])), one(ratio([1.5, 1.6])))] == [False]
    assert not comparing.differences(one(seconds(1)), one(seconds(50)))


def test_what_came_or_went_is_told():
    lost = Result({"size": 1}, {})
    assert [str(d) for d in comparing.differences(one(count(3)), lost)] == ["row, figure: 3 -> not there"]
    assert comparing.differences(one(count(3)), dataclasses.replace(one(count(3)), setting={"size": 2}))[0].is_failure


def test_a_peer_that_is_ahead_is_found_unless_its_gradients_are_wrong():
    class Fake:
        COLUMNS = MappingProxyType({"bytes": "bytes", "time": "time"})
        RIVALRIES = (Rivalry(ours="we", theirs=("they",), figures=("bytes", "time"), if_right={"bytes": "gradients"}),)

    ours = {"bytes": count(3), "time": ratio([1.0, 1.1])}
    theirs = {"bytes": count(2), "time": ratio([0.5, 0.6]), "gradients": verdict("equal")}
    assert ahead(Fake, Result({}, {"we": ours, "they": theirs})) == [
        "they, beside we: bytes 2 against 3; time 0.55 against 1.05"
    ]
    theirs |= {"gradients": verdict("2 of 9 lost"), "time": ratio([1.0, 1.1])}
    assert ahead(Fake, Result({}, {"we": ours, "they": theirs})) == []


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_what_raises_in_a_process_of_its_own_is_told_in_one_line():
    def fails():
        raise ValueError("no\nway")

    with pytest.raises(CannotRunError, match=r"^ValueError: no$"):
        apart(fails)
    assert apart(str, 3) == "3"
