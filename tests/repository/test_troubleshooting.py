"""docs/troubleshooting.md: its messages are those that are raised, and no error of ours is missing."""

from __future__ import annotations

import ast
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lowtide import errors
from lowtide.auditing import CannotAuditError
from support.pages import CODE

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
MESSAGES = re.findall(r"```text\n(.*?)\n```", CODE.sub("", PAGE), flags=re.DOTALL)
HOLE = "…"


@pytest.fixture(scope="module")
def raised() -> list[str]:
    """What really comes: each trouble is made once, in one process."""
    command = [sys.executable, str(Path(__file__).with_name("troubles.py"))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def written() -> list[str]:
    """All strings of the sources, with holes where values go."""
    found = []
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(v.value if isinstance(v, ast.Constant) else HOLE for v in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def pattern(message: str) -> re.Pattern[str]:
    return re.compile(".*".join(map(re.escape, message.split(HOLE))), flags=re.DOTALL)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message[:40])
def test_a_message_is_one_that_comes(message: str, raised: list[str]):
    if any(pattern(message).match(real) for real in raised):
        return
    kind, _, text = message.rpartition("Error: ")
    assert not kind or hasattr(errors, f"{kind}Error"), "neither raised here nor an error of ours"
    literal = max(text.split(HOLE), key=len)
    assert any(pattern(text).search(source) for source in written() if literal in source)


def test_every_trouble_that_is_made_is_on_the_page(raised: list[str]):
    for real in raised:
        assert any(pattern(message).match(real) for message in MESSAGES), real


def test_every_error_is_on_the_page():
    classes = {
        name for name, thing in inspect.getmembers(errors, inspect.isclass) if thing.__module__ == errors.__name__
    }
    missing = {name for name in classes | {CannotAuditError.__name__} if not re.search(rf"\b{name}\b", PAGE)}
    assert not missing
