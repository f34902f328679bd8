"""The architecture page against the code: its rooms are those of the contracts, and its walks lead through it."""

from __future__ import annotations

import ast
import itertools
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
HOP = re.compile(r"^(\d+)\. `([\w/]+\.py)` `([\w.]+)`", re.MULTILINE)
MOST_HOPS = {"A tensor's walk": 45, "A plan's walk": 45, "An audit's walk": 40}


def hops(walk: str) -> list[tuple[int, str, str]]:
    section = PAGE.partition(f"## {walk}\n")[2].partition("\n## ")[0]
    return [(int(number), file, function) for number, file, function in HOP.findall(section)]


def functions_in(file: str) -> set[str]:
    """Every function of a module by its qualified name."""
    tree = ast.parse((ROOT / "src" / file).read_text())
    found = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    for kind in (node for node in tree.body if isinstance(node, ast.ClassDef)):
        found |= {f"{kind.name}.{node.name}" for node in kind.body if isinstance(node, ast.FunctionDef)}
    return found


@pytest.mark.parametrize("walk", MOST_HOPS)
def test_a_walk_is_short_and_numbered(walk: str):
    numbers = [number for number, _, _ in hops(walk)]
    assert numbers == list(range(1, len(numbers) + 1))
    assert 20 < len(numbers) <= MOST_HOPS[walk]


@pytest.mark.parametrize("walk", MOST_HOPS)
def test_every_function_of_a_walk_exists(walk: str):
    missing = [f"{file}: {function}" for _, file, function in hops(walk) if function not in functions_in(file)]
    assert missing == []


def test_the_drawing_has_the_rooms_of_the_contract():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(contract for contract in contracts if contract["name"] == "Imports run one way")["layers"]
    drawing = (ROOT / "docs" / "img" / "layers.svg").read_text()
    boxes = [
        (float(y), name) for y, name in re.findall(r'<text class="title" x="[\d.]+" y="(\d+)">(\w+)</text>', drawing)
    ]
    heights = {name: y for y, name in boxes}
    rooms = [layer.split(" | ") for layer in layers]
    assert set(heights) - {"lowtide_zoo"} == {name for layer in rooms for name in layer}
    tops = [[heights[name] for name in layer] for layer in rooms]
    assert all(max(upper) < min(lower) for upper, lower in itertools.pairwise(tops)), "top to bottom"
