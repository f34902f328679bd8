"""No test ignores warnings wholesale: a filter names the message or the module, so that a warning of Lowtide shows."""

from __future__ import annotations

import ast
import tomllib
import warnings
from pathlib import Path

import pytest

from support.foreign_warnings import ignoring_warnings_of

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "tests").rglob("*.py"))


def _is_blanket(text: str) -> bool:
    """Whether a filter as pytest reads it, `action:message:category:module:line`, ignores without message or module."""
    action, message, _, module = (*text.split(":"), "", "", "")[:4]
    return action == "ignore" and not message and not module


def _strings(call: ast.Call) -> list[str]:
    return [arg.value for arg in call.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]


def _blanket_filters(text: str) -> list[str]:
    """Lines with a mark of pytest, or a call of the warnings module, that ignores without message or module."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        strings = _strings(node)
        if node.func.attr == "simplefilter":
            is_blanket = strings[:1] == ["ignore"]
        elif node.func.attr == "filterwarnings" and strings[:1] == ["ignore"]:
            named = {keyword.arg for keyword in node.keywords} & {"message", "module"}
            is_blanket = len(node.args) == 1 and not named
        else:
            is_blanket = node.func.attr == "filterwarnings" and any(map(_is_blanket, strings))
        if is_blanket:
            found.append(f"line {node.lineno}: {ast.unparse(node)}")
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT / "tests")))
def test_a_filter_names_what_it_ignores(path: Path):
    assert _blanket_filters(path.read_text()) == []


def test_warnings_are_errors_for_all():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    assert settings["filterwarnings"][0] == "error"
    assert not any(map(_is_blanket, settings["filterwarnings"]))
    assert not any(option.startswith("-W") for option in settings["addopts"])


@pytest.mark.parametrize(
    "line",
    [
        'pytestmark = pytest.mark.filterwarnings("ignore")',
        'pytestmark = [pytest.mark.filterwarnings("error", "ignore::UserWarning")]',
        'warnings.simplefilter("ignore")',
        'warnings.simplefilter("ignore", UserWarning)',
        'warnings.filterwarnings("ignore")',
        'warnings.filterwarnings("ignore", category=UserWarning)',
    ],
)
def test_the_check_sees_a_blanket_filter(line: str):
    assert len(_blanket_filters(line)) == 1


@pytest.mark.parametrize(
    "line",
    [
        'pytest.mark.filterwarnings("ignore:fan_in_fan_out")',
        'pytest.mark.filterwarnings("ignore:::transformers")',
        'warnings.filterwarnings("ignore", message="None of the inputs")',
        'warnings.simplefilter("error")',
    ],
)
def test_the_check_lets_named_ones_be(line: str):
    assert _blanket_filters(line) == []


def test_a_warning_of_lowtide_shows_whatever_module_it_points_to():
    def warn(message: str) -> None:
        warnings.warn_explicit(message, UserWarning, "file.py", 1, module="transformers.trainer")

    with ignoring_warnings_of("transformers"):
        warn("a flag is deprecated")
        with pytest.raises(UserWarning, match="caches"):
            warn("lowtide: caches are dropped")
