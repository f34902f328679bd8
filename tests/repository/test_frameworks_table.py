"""docs/frameworks.md: each cell of its table is one of a few words, and each test that it names exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "frameworks.md").read_text()
SECTION = PAGE.partition("## What is tested")[2].partition("\n## ")[0]
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in SECTION.splitlines() if line.startswith("| ")]
NAMED = sorted(set(re.findall(r"`(test_\w+\.py)::(test_\w+)`", PAGE)))


def functions(file: str) -> set[str]:
    trees = [ast.parse(path.read_text()) for path in (ROOT / "tests").rglob(file)]
    return {node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize(("file", "name"), NAMED)
def test_a_named_test_exists(file: str, name: str):
    assert name in functions(file)


def test_the_table_says_one_of_four_words():
    header, *rows = ROWS
    assert header[1:6] == ["recompute", "offload", "tile(mlp)", "tile(attention)", "tile(loss)"]
    assert len(rows) > 12
    for row in rows:
        assert {*row[1:6]} <= {"tested", "refused", "alone", "unknown"}, row
        assert "test_" in row[6] or row[6].startswith("the same"), row
