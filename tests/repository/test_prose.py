"""Docstrings say what a thing does: their first sentence has a verb, and words mean one thing."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import lowtide

SOURCE = Path(lowtide.__file__).parent.parent
FILES = sorted([*SOURCE.glob("lowtide*/**/*.py"), SOURCE / "lowtide_pytest.py"])

NOT_VERBS = re.compile(
    r"(an?|after|all|as|before|by|each|else|every|for|how|if|in|its?|not|of|one|that|the|this|those|to|what|when|where|"
    r"whether|with|without)",
    re.IGNORECASE,
)
OLD_WORDS = re.compile(
    r"\b(blank tensors?|studio|specimens?|whereabouts|treatments?|conveyor|lanes|scene|companions)\b", re.IGNORECASE
)


def _functions(path: Path) -> list[ast.FunctionDef]:
    """Functions and methods with a docstring. A property is named by a noun, and may be explained by one."""
    return [
        node
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
        and ast.get_docstring(node)
        and not any("property" in ast.unparse(decorator) for decorator in node.decorator_list)
    ]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_a_function_says_what_it_does(path: Path):
    first = {node.name: (ast.get_docstring(node) or "").split()[0] for node in _functions(path)}
    assert {name: word for name, word in first.items() if NOT_VERBS.fullmatch(word.strip("`,.:"))} == {}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_words_that_were_given_up_do_not_come_back(path: Path):
    assert OLD_WORDS.findall(path.read_text()) == []


def test_there_is_something_to_look_at():
    assert sum(len(_functions(path)) for path in FILES) > 500
