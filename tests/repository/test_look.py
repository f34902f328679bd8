"""One look: the pages of plan, audit, zoo, trace and an applied policy share their style and bring no own colour."""

from __future__ import annotations

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
    assert [page.name for page in PAGES] == ["applied.html", "audit.html", "plan.html", "trace.html", "zoo.html"]


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
