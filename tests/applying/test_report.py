"""A report as an object, as text, as JSON and as a page."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

import lowtide
from lowtide.errors import InvalidValueError
from lowtide.units import format_bytes
from support.browser import needs_browser, show

if TYPE_CHECKING:
    from pathlib import Path

    from lowtide.applying.report import Report


def blocks(count: int = 3) -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)) for _ in range(count)))


@pytest.fixture
def applied(sim: str) -> lowtide.Applied:
    model = blocks().to(sim)
    applied = lowtide.apply(model, "recompute+offload; 2: recompute")
    model(torch.randn(32, 64).to(sim)).square().mean().backward()
    applied.kept = model  # the handle does not keep it alive
    return applied


def test_without_a_format_it_is_data_that_prints(applied: lowtide.Applied):
    report = applied.report()
    assert applied.report("text") == str(report)
    assert json.loads(applied.report(format="json")) == json.loads(json.dumps(report.to_dict()))


@pytest.mark.parametrize("name", ["HTML", "xml", ""])
def test_an_unknown_format_is_refused(applied: lowtide.Applied, name: str):
    with pytest.raises(InvalidValueError, match=f"unknown report format '{name}': use one of text, json, html"):
        applied.report(name)


def test_the_page_has_every_region_with_its_policy(applied: lowtide.Applied):
    page = applied.report(format="html")
    assert page == applied.report().to_html()
    for region in applied.report().regions:
        assert f'<td class="name">{region.name}</td>\n<td><code>{region.policy}</code></td>' in page
    assert "Host memory: 0 B now, 8 KiB at the peak." in page, "the first block's input; the second's stayed"


class Attending(nn.Module):
    """A block with attention."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.project(x)[None, None]
        return x + nn.functional.scaled_dot_product_attention(heads, heads, heads)[0, 0]


@pytest.fixture
def keeping() -> lowtide.Applied:
    """Two of three regions keep attention; two forwards, and one backward."""
    model = nn.Sequential(*(Attending() for _ in range(3)))
    applied = lowtide.apply(model, "recompute(keep=attention); 2: recompute")
    x = torch.randn(8, 16)
    model(x).sum().backward()
    applied.kept = model, model(x)
    return applied


def test_kept_outputs_are_told(keeping: lowtide.Applied):
    report = keeping.report()
    assert [(region.kept_outputs, region.recalled_outputs) for region in report.regions] == [(2, 1), (2, 1), (0, 0)]
    assert (report.figures()["kept_outputs"], report.figures()["recalled_outputs"]) == (4, 2)
    lines = str(report).splitlines()
    assert lines[1].startswith(
        "  0-1 x2 [recompute(keep=attention)] forwards 2, recomputes 1, kept outputs 2, recalled 1, packed 0 B"
    )
    assert lines[2].startswith("  2 [recompute] forwards 2, recomputes 1, packed 0 B"), "as before, without keep="
    data = json.loads(keeping.report("json"))["regions"]
    assert [(region["kept_outputs"], region["recalled_outputs"]) for region in data] == [(2, 1), (2, 1), (0, 0)]


def test_regions_that_keep_a_different_number_have_lines_of_their_own(keeping: lowtide.Applied):
    report = keeping.report()
    report.regions[1] = dataclasses.replace(report.regions[1], recalled_outputs=0)
    assert [line.split()[0] for line in str(report).splitlines()[1:4]] == ["0", "1", "2"]


def test_the_page_tells_kept_outputs_only_where_some_are(keeping: lowtide.Applied, applied: lowtide.Applied):
    page = keeping.report("html")
    assert "3 recomputes, 4 outputs kept and 2 recalled, 0 B moved to the store" in page
    assert '<th class="number">outputs kept</th><th class="number">outputs recalled</th>' in page
    assert page.count('<td class="number">2</td><td class="number">1</td>') == 2
    assert "outputs kept" not in applied.report("html")


def test_a_page_of_a_policy_that_has_not_run(device: str):
    model = blocks()
    page = lowtide.apply(model, "recompute").report("html")
    assert "3 regions, 0 recomputes" in page
    assert 'id="boundary"' not in page, "no chart of nothing"


@needs_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_browser_shows_the_report(applied: lowtide.Applied, tmp_path: Path, scheme: str):
    probe = """return {
        rows: document.querySelectorAll("table.figures tbody tr").length,
        bars: document.querySelectorAll("#boundary .bar").length,
        loaded: performance.getEntriesByType("resource").map(e => e.name),
      }"""
    shown = show(applied.report("html"), tmp_path, scheme=scheme, probe=probe)
    assert shown.answer == {"rows": 3, "bars": 6, "loaded": []}
    assert shown.console == []
    assert sum(shown.pixel(4, 4)) > 700 if scheme == "light" else sum(shown.pixel(4, 4)) < 100


@pytest.mark.parametrize(
    "policy",
    [
        "recompute",
        "recompute(keep=attention)",
        "recompute+offload(disk={})",
        "recompute(keep=attention)+offload(disk={})",
    ],
)
def test_saved_bytes_are_those_that_a_trace_of_the_plain_model_has_more(policy: str, tmp_path: Path):
    plain, _ = traced_llama(None)
    saved, report = traced_llama(policy.format(tmp_path))
    assert report.saved_per_step == pytest.approx(plain - saved, rel=2e-3)  # what blocks share is counted for each
    assert f"saves {format_bytes(report.saved_per_step)} of device memory per step" in report.summary()
    assert report.logged_figures()["saved_bytes"] == report.saved_per_step


@pytest.mark.parametrize("tiles", ["mlp", "attention, mlp"])
def test_what_tiles_save_is_said_to_be_more(tiles: str):
    plain, _ = traced_llama(None)
    saved, report = traced_llama(f"recompute+tile({tiles}, tokens=64)")
    assert 0 < report.saved_per_step < plain - saved
    assert f"saves at least {format_bytes(report.saved_per_step)}" in report.summary()


def test_a_policy_of_tiles_alone_tells_of_its_tiles():
    model = blocks(2)
    with lowtide.apply(model, "tile(mlp, tokens=8)", regions=["0", "1"]) as applied:
        assert "nothing was recomputed, moved or run in tiles yet" in str(applied)
        model(torch.randn(32, 64)).square().mean().backward()
        report = applied.report()
        tiles, calls = (sum(getattr(ledger, name) for ledger in report.tiles) for name in ("tiles", "calls"))
        assert tiles > calls > 0
        assert str(applied).splitlines()[1:] == [
            "what its tiles save of device memory is not counted",
            f"0 recomputes so far, {tiles} tiles in {calls} calls",
        ]


def traced_llama(policy: str | None) -> tuple[int, Report | None]:
    """Return the bytes that a step of a small Llama saved by its trace, and the report of its policy."""
    needs = pytest.importorskip("transformers", reason="the hf extra is not installed")
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    model = needs.LlamaForCausalLM(needs.LlamaConfig(num_hidden_layers=3, **sizes)).train()
    applied = None if policy is None else lowtide.apply(model, policy)
    ids = torch.arange(256)[None] % 64
    with lowtide.trace(model) as trace:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return trace.saved_bytes, None if applied is None else applied.report()
