"""The exception tree: drawn in the docstring of `lowtide.errors` as it is, and nowhere else."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from lowtide import errors

SRC = Path(errors.__file__).parent.parent
CLASSES = [thing for thing in vars(errors).values() if isinstance(thing, type) and issubclass(thing, Exception)]
LINE = re.compile(r"^ {4}(?P<drawn>[|` -]*\w+Error) +(?P<phrase>\S.*)$", re.MULTILINE)


def drawing_of(cls: type, indent: str = "", branch: str = "") -> list[str]:
    children = [child for child in CLASSES if cls in child.__bases__]
    lines = [f"{indent}{branch}{cls.__name__}"]
    inner = indent + {"": "", "|-- ": "|   ", "`-- ": "    "}[branch]
    for child in children:
        lines += drawing_of(child, inner, "`-- " if child is children[-1] else "|-- ")
    return lines


def test_the_drawing_is_the_tree():
    drawn = [match["drawn"] for match in LINE.finditer(errors.__doc__)]
    assert drawn == drawing_of(errors.LowtideError)
    assert len(drawn) == len(CLASSES)


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_the_drawing_names_the_builtin_parent(cls: type):
    own = [base.__name__ for base in cls.__bases__ if base.__module__ == "builtins" and base is not Exception]
    (phrase,) = [match["phrase"] for match in LINE.finditer(errors.__doc__) if match["drawn"].endswith(cls.__name__)]
    assert re.findall(r"\[(\w+)\]", phrase) == own


def test_every_public_exception_is_in_the_tree():
    names = {cls.__name__ for cls in CLASSES}
    elsewhere = []
    for path in SRC.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and path != Path(errors.__file__):
                bases = {ast.unparse(base).rpartition(".")[2] for base in node.bases}
                is_exception = bases & names or any(re.search(r"(Error|Exception|Warning)$", base) for base in bases)
                if is_exception and not node.name.startswith("_"):
                    elsewhere.append(f"{path.relative_to(SRC)}: {node.name}")
    assert not elsewhere


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("InvalidValueError", errors.InvalidValueError),
        ("LowtideError", errors.LowtideError),
        ("NoSuchError", errors.PlanError),
        ("by_name", errors.PlanError),
        ("__builtins__", errors.PlanError),
    ],
)
def test_an_error_of_another_process_is_one_of_the_tree(name: str, error: type[errors.LowtideError]):
    assert errors.by_name(name) is error
