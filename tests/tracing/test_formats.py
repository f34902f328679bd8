"""A trace in other tools' formats, and as a page."""

from __future__ import annotations

import copy
import itertools
import json
import pickle
import pickletools
from typing import TYPE_CHECKING

import pytest
import torch
from torch.cuda import _memory_viz

import lowtide
from lowtide import simdevice
from models.traced import LAYERS, batch, boundary, stack, step
from support.browser import needs_browser, show

if TYPE_CHECKING:
    from pathlib import Path

READ_BY_MEMORY_VIZ = {
    *("APPEND", "APPENDS", "BINFLOAT", "BINGET", "BININT", "BININT1", "BININT2", "BINPUT", "BINUNICODE", "DICT"),
    *("EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE", "FRAME", "LIST", "LONG1", "LONG_BINGET", "LONG_BINPUT", "MARK"),
    *("MEMOIZE", "NEWFALSE", "NEWTRUE", "NONE", "PROTO", "SETITEM", "SETITEMS", "SHORT_BINUNICODE", "STOP", "TUPLE"),
    *("TUPLE1", "TUPLE2", "TUPLE3"),
}
"""What the page's own reader of pickles knows (torch/utils/viz/MemoryViz.js), up to protocol 4."""


@pytest.fixture(scope="module")
def seen() -> lowtide.Trace:
    simdevice.enable()
    model, x = stack("sim"), batch("sim")
    optimizer = torch.optim.AdamW(model.parameters())
    with lowtide.apply(model, "recompute+offload"), lowtide.trace(model, optimizer) as trace:
        step(model, x)
        optimizer.step()
    return trace


@pytest.fixture
def snapshot(seen: lowtide.Trace) -> dict:
    return pickle.loads(seen.to_memory_viz())  # noqa: S301  (written here)


def test_the_text_has_the_peak_and_the_regions(seen: lowtide.Trace):
    lines = str(seen).splitlines()
    assert lines[0].startswith("trace of Sequential on sim:0: peak ")
    assert "  0-3 x4 forwards 1, recomputes 1, saved 0 B to 8 KiB, recomputed 64 KiB" in lines
    assert lines[-1] == "  moved: 24 KiB to host, 24 KiB to device"


def test_the_data_is_plain(seen: lowtide.Trace):
    data = json.loads(seen.to_json())
    assert data == json.loads(json.dumps(seen.to_dict()))
    assert data["saved_bytes"] == sum(data["saved"].values())
    assert max(sum(sample["bytes"].values()) for sample in data["samples"]) == data["peak_bytes"]
    assert sum(size for _, _, size in data["peak"]["owners"]) == data["peak_bytes"]
    assert len(data["regions"]) == LAYERS
    assert sum(region["to_device_bytes"] for region in data["regions"]) == (LAYERS - 1) * boundary()


# Chrome


def test_chromes_events_have_every_run_of_a_region(seen: lowtide.Trace):
    events = json.loads(seen.to_chrome())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    regions = [(event["name"], event["ts"], event["dur"]) for event in spans if event["tid"] == 2]
    assert [name for name, _, _ in regions] == [f"{span.region} {span.phase}" for span in seen.spans if span.region]
    for span, (_, begin, length) in zip((span for span in seen.spans if span.region), regions, strict=True):
        assert begin == pytest.approx(span.begin * 1e6, abs=1)
        assert length == pytest.approx((span.end - span.begin) * 1e6, abs=1)
    assert [event["name"] for event in spans if event["tid"] == 1] == ["forward", "backward", "optimizer"]
    for before, after in itertools.pairwise(regions):
        assert before[1] + before[2] <= after[1] + 1e-6, "spans of one track do not overlap"


def test_chromes_counters_reach_the_peak(seen: lowtide.Trace):
    events = json.loads(seen.to_chrome())["traceEvents"]
    counters = [event for event in events if event["ph"] == "C"]
    by_kind = [event["args"] for event in counters if event["name"] == "device bytes"]
    assert max(sum(values.values()) for values in by_kind) == seen.peak_bytes
    assert len({frozenset(values) for values in by_kind}) == 1, "every point has every kind"
    assert max(e["args"]["host"] for e in counters if e["name"] == "stores") == (LAYERS - 1) * boundary()
    copies = [event["args"]["bytes"] for event in events if event["ph"] == "i"]
    assert sum(copies) == 2 * (LAYERS - 1) * boundary()
    timed = [event["ts"] for event in events if event["ph"] != "M"]
    assert timed == sorted(timed)


# memory_viz


def test_torchs_own_tools_read_the_snapshot(snapshot: dict, capsys: pytest.CaptureFixture[str]):
    def lines(text: str) -> list[str]:
        return text.splitlines()

    assert "segments: 2" in _memory_viz.segsum(snapshot), "which checks that blocks fill their segments"
    assert "Device 0" in _memory_viz.trace(snapshot)
    sizes = [int(line.rpartition(" ")[2]) for line in _memory_viz.memory(snapshot, lines)]
    assert sum(sizes) == sum(segment["total_size"] for segment in snapshot["segments"])
    assert _memory_viz.segments(snapshot, lines)
    _memory_viz.compare(snapshot["segments"], snapshot["segments"], lines)
    assert "only_before = []" in capsys.readouterr().out
    assert "snapshot.pickle" in _memory_viz.trace_plot(snapshot)
    assert "snapshot.pickle" in _memory_viz.segment_plot(snapshot)


def test_the_page_can_unpickle_it(seen: lowtide.Trace, snapshot: dict):
    found = list(pickletools.genops(seen.to_memory_viz()))
    assert {opcode.name for opcode, _, _ in found} <= READ_BY_MEMORY_VIZ
    assert found[0][1] == 4
    categories = {entry["category"] for entry in snapshot["device_traces"][0]}
    assert {"weights", "gradients", "saved", "recomputed", "restored", "optimizer"} <= categories
    assert "unknown" in categories, "with categories and without this one, the page fails"


def test_the_snapshot_is_the_trace(seen: lowtide.Trace, snapshot: dict):
    for place, entries in zip(("device", "host"), snapshot["device_traces"], strict=True):
        live: dict[int, int] = {}
        peak = 0
        for entry in entries:
            start, size = entry["addr"], entry["size"]
            if entry["action"] == "alloc":
                assert all(start + size <= other or other + length <= start for other, length in live.items())
                live[start] = size
                peak = max(peak, sum(live.values()))
            elif entry["action"] == "free_completed":
                assert live.pop(start) == size
        assert peak == (seen.peak_bytes if place == "device" else seen.peak_host_bytes)
        (segment,) = [found for found in snapshot["segments"] if found["device"] == ("device", "host").index(place)]
        assert sum(live.values()) == segment["allocated_size"]
        blocks = {b["address"]: b["size"] for b in segment["blocks"] if b["state"] == "active_allocated"}
        assert blocks == live
    left = _memory_viz.filter_alloc_free_pairs(copy.deepcopy(snapshot))["device_traces"][0]
    assert {entry["action"] for entry in left} == {"alloc", "snapshot"}


def test_a_frame_names_the_region(snapshot: dict):
    frames = [frame for entry in snapshot["device_traces"][0] for frame in entry["frames"]]
    assert {"0", "1", "2", "3", "outside the regions"} == {frame["filename"] for frame in frames}
    assert "saved, made in forward" in {frame["name"] for frame in frames}


# The page


@pytest.fixture(scope="module")
def page(seen: lowtide.Trace) -> str:
    pytest.importorskip("jinja2", reason="the html extra is not installed")
    return seen.to_html()


def test_an_empty_trace_has_a_page_too():
    model = stack()
    with lowtide.trace(model) as seen:
        pass
    assert "Trace of a training step" in seen.to_html()
    assert seen.peak_bytes == sum(parameter.nbytes for parameter in model.parameters())
    assert json.loads(seen.to_chrome())["traceEvents"]
    assert pickle.loads(seen.to_memory_viz())["segments"]  # noqa: S301  (written here)


@needs_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_browser_shows_the_charts(page: str, tmp_path: Path, scheme: str):
    probe = """return {
        kinds: document.querySelectorAll("#kinds .band").length,
        dots: new Set([...document.querySelectorAll("#kinds .dot")].map(e => e.getAttribute("fill"))).size,
        regions: document.querySelectorAll("#regions .band").length,
        runs: document.querySelectorAll("#runs .bar").length,
        rows: document.querySelectorAll("table.figures tbody tr").length,
        words: [...document.querySelectorAll("#kinds text")].map(e => e.textContent),
        ink: getComputedStyle(document.querySelector("#kinds text")).fill,
        text: getComputedStyle(document.body).color,
        loaded: performance.getEntriesByType("resource").map(e => e.name),
      }"""
    shown = show(page, tmp_path, scheme=scheme, probe=probe)
    assert (shown.answer["kinds"], shown.answer["dots"]) == (8, 2), "kinds of bytes; the allocator and the store"
    assert shown.answer["regions"] == LAYERS + 1
    assert shown.answer["runs"] >= 3 * LAYERS
    assert shown.answer["rows"] == LAYERS
    expected = {"forward", "backward", "optimizer", "saved activations", "torch's allocator", "in the host store"}
    assert expected <= set(shown.answer["words"])
    assert shown.answer["ink"] == shown.answer["text"], "the chart takes its ink from the page"
    assert shown.console == []
    assert shown.answer["loaded"] == []
    assert sum(shown.pixel(4, 4)) > 700 if scheme == "light" else sum(shown.pixel(4, 4)) < 100
