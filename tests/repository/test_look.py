"""One look: the pages of plan, audit, zoo, trace and an applied policy share their style and bring no own colour."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

import lowtide

PACKAGE = Path(lowtide.__file__).parent
SHARED = ("base.html", "parts.html")
PAGES = sorted(
    (path for path in PACKAGE.parent.rglob("lowtide*/templates/*.html") if path.name not in SHARED),
    key=lambda path: path.name,
)
COLOUR = re.compile(r"#[0-9a-fA-F]{3,8}\b(?!;)|rgb|hsl|:\s*(?:white|black|gr[ae]y|red|green|blue)\b")


def test_all_pages_are_looked_at():
    assert [page.name for page in PAGES] == [
        *("applied.html", "audit.html", "plan.html", "planner.html", "trace.html", "zoo.html")
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_takes_its_colours_from_the_look(page: Path):
    text = page.read_text()
    assert text.startswith('{% extends "base.html" %}')
    style = "".join(re.findall(r"<style>(.*?)</style>", text, flags=re.DOTALL))
    assert COLOUR.findall(style) == []
    assert re.findall(r"style=\"[^\"]*colou?r", text) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_says_what_it_is_before_its_title_and_what_to_know_at_its_end(page: Path):
    text = page.read_text()
    assert '<p class="kicker">' in text
    assert text.index('class="kicker"') < text.index("<h1>")
    assert "{% block footer %}" in text


LOOK = (Path(lowtide.__file__).parent / "templates/look.css").read_text()


SCHEMES = pytest.mark.parametrize("scheme", ["light", "dark"])


def colours(block: str) -> dict[str, tuple[float, ...]]:
    pairs = re.findall(r"--([\w-]+): #(\w{6});", block)
    return {name: tuple(int(value[i : i + 2], 16) / 255 for i in (0, 2, 4)) for name, value in pairs}


def contrast(one: tuple[float, ...], other: tuple[float, ...]) -> float:
    """As the WCAG defines it."""

    def luminance(colour: tuple[float, ...]) -> float:
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in colour]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    bright, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (bright + 0.05) / (dark + 0.05)


@SCHEMES
def test_words_can_be_read_on_their_ground(scheme: str):
    light, dark = LOOK.split("@media (prefers-color-scheme: dark)")
    palettes = {"light": colours(light), "dark": colours(dark.split("* {")[0])}
    assert palettes["light"].keys() == palettes["dark"].keys()
    palette = palettes[scheme]
    pairs = [(kind, f"{kind}-ground") for kind in ("pass", "fail", "inconclusive", "not-applicable", "accent")]
    pairs += itertools.product(["text", "quiet", "accent"], ["ground", "card"])
    for ink, ground in pairs:
        assert contrast(palette[ink], palette[ground]) >= 4.5, (scheme, ink, ground)
