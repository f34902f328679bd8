"""Charts are drawn in one file, to scale, with every figure under the pointer."""

from __future__ import annotations

import itertools
import re
from xml.etree import ElementTree as ET

import pytest

from lowtide.charts import Dots, Mark, RowSeries, Run, Scale, Series, areas, columns, rows

PLAIN, OURS = "#111111", "#222222"


def drawn(chart: str, kind: str) -> list[ET.Element]:
    return [element for element in ET.fromstring(chart).iter() if element.get("class") == kind]  # noqa: S314  (ours)


def sizes(chart: str, side: str) -> list[float]:
    return [float(bar.attrib[side]) for bar in drawn(chart, "bar")]


def words(chart: str) -> list[str]:
    return [element.text or "" for element in ET.fromstring(chart).iter("text")]  # noqa: S314  (ours)


def test_columns_are_as_high_as_their_figures():
    series = [Series("plain", PLAIN, [4, 2], ["a", "b"]), Series("ours", OURS, [1, 0], ["c", "d <e>"])]
    beside = columns("c", ["x", "y"], series, unit="MiB")
    first, *_ = heights = sizes(beside, "height")
    assert [height / first for height in heights] == pytest.approx([1, 0.5, 0.25, 0], abs=1e-3)
    assert [bar[0].text for bar in drawn(beside, "bar")] == ["a", "b", "c", "d <e>"]
    assert {"MiB", "plain", "ours", "x", "y", "0", "4"} <= set(words(beside))
    stacked = columns("c", ["x", "y"], series, unit="MiB", is_stacked=True)
    tops, high = sizes(stacked, "y"), sizes(stacked, "height")
    assert tops[0] == pytest.approx(tops[2] + high[2], abs=0.11), "the second stands on the first"


def test_charts_with_one_scale_can_be_compared():
    scale = Scale(8, 4, 100)
    small, large = (columns("c", ["x"], [Series("s", PLAIN, [v], [""])], unit="B", scale=scale) for v in (2, 8))
    assert sizes(small, "height")[0] == pytest.approx(sizes(large, "height")[0] / 4, abs=0.1)
    assert sizes(small, "width") == sizes(large, "width")


def test_names_that_have_no_room_are_left_out_evenly():
    names = [f"layers.{number}" for number in range(100)]
    chart = columns("c", names, [Series("s", PLAIN, [1.0] * 100, [""] * 100)], unit="B")
    seen = [int(word.removeprefix("layers.")) for word in words(chart) if word.startswith("layers.")]
    assert 5 < len(seen) < 30
    assert len({after - before for before, after in itertools.pairwise(seen)}) == 1


def test_rows_are_as_long_as_their_runs_and_the_limit_is_drawn():
    series = [RowSeries("forward", OURS, [Run(0, 0, 2, "first"), Run(1, 2, 3, "second")])]
    chart = rows("r", ["a", "b" * 80], series, axis="ms", limit=6)
    assert sizes(chart, "width")[0] == pytest.approx(2 * sizes(chart, "width")[1], abs=0.2)
    assert sizes(chart, "x")[1] == pytest.approx(sizes(chart, "x")[0] + sizes(chart, "width")[0], abs=0.2)
    assert len(drawn(chart, "limit")) == 1
    assert "a" in words(chart)
    assert "b" * 80 not in words(chart), "it is cut"
    assert f"<title>{'b' * 80}</title>" in chart, "and whole under the pointer"


def test_areas_stand_on_each_other_and_every_place_says_what_it_is():
    bands = [Series("weights", PLAIN, [1, 1, 1]), Series("saved", OURS, [0, 2, 1])]
    dots = [Dots("allocator", "#333333", [0.5], [3], ["3 MiB"])]
    marks = [Mark(0, "forward"), Mark(1, "backward"), Mark(1.01, "optimizer")]
    chart = areas("a", [0, 1, 2], bands, ["p", "q", "r"], unit="MiB", axis="ms", marks=marks, dots=dots)
    lower, upper = (re.findall(r"[\d.]+ ([\d.]+)", band.attrib["d"]) for band in drawn(chart, "band"))
    assert lower[:6] == upper[6:][::-1], "the upper band begins where the lower one ends"
    assert [strip[0].text for strip in drawn(chart, "strip")] == ["p", "q", "r"]
    assert [dot[0].text for dot in drawn(chart, "dot")] == ["3 MiB"]
    assert {"forward", "backward", "weights", "saved", "allocator"} <= set(words(chart))
    assert "optimizer" not in words(chart), "no room beside the word before"
    assert len(drawn(chart, "mark")) == 3


def test_an_empty_chart_can_be_drawn():
    assert "<svg" in areas("a", [], [], [], unit="B", axis="ms")
