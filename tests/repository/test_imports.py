"""Imports run one way between modules, for types as well; and production code imports no test tools."""

from __future__ import annotations

import ast
import graphlib
from pathlib import Path
from typing import TYPE_CHECKING

import lowtide

if TYPE_CHECKING:
    from collections.abc import Iterator

SOURCE = Path(lowtide.__file__).parent.parent

KNOWN = {
    # a result writes its own page, and the page knows what it shows
    ("lowtide.auditing.html", "lowtide.auditing.report"),
    ("lowtide.planning.page", "lowtide.planning.result"),
    ("lowtide.tracing.formats", "lowtide.tracing.result"),
    ("lowtide.tracing.page", "lowtide.tracing.result"),
    # how tokens are cut is said beside `tile`
    ("lowtide.tiling.assembly", "lowtide.tiling.tile"),
    ("lowtide.tiling.tiler", "lowtide.tiling.tile"),
}
"""Imports back to an importer, for its types alone."""


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")


FILES = {name_of(path): path for path in SOURCE.glob("lowtide*/**/*.py")}


def imports_of(path: Path) -> Iterator[str]:
    """Every name that is imported anywhere in a file: in functions and under TYPE_CHECKING, too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in FILES else node.module


def graph_of(package: str) -> dict[str, set[str]]:
    names = {name for name in FILES if f"{name}.".startswith(f"{package}.")}
    return {name: {other for other in imports_of(FILES[name]) if other in names - {name}} for name in names}


def test_the_modules_that_change_a_model_have_no_cycle():
    graph = graph_of("lowtide.applying")
    assert graph["lowtide.applying.applied"] >= {"lowtide.applying.seam", "lowtide.applying.guard"}
    graphlib.TopologicalSorter(graph).prepare()


def test_there_is_no_cycle_but_for_a_few_types():
    graph = graph_of("lowtide")
    for importer, imported in KNOWN:
        graph.get(importer, set()).discard(imported)
    graphlib.TopologicalSorter(graph).prepare()


def test_production_code_mocks_nothing():
    for name, path in FILES.items():
        assert not {module.split(".")[0] for module in imports_of(path)} & {"unittest", "mock"}, name
