"""Private names of torch stand in `lowtide/_torch.py` alone. ruff bans the modules; this looks for the attributes."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

import pytest

import lowtide
from lowtide import _torch

SOURCE = Path(lowtide.__file__).parent.parent
ROOT = Path(__file__).parents[2]
DOOR = SOURCE / "lowtide" / "_torch.py"
FILES = sorted(
    path
    for path in [*SOURCE.glob("lowtide*/**/*.py"), SOURCE / "lowtide_pytest.py"]
    if path != DOOR and "simdevice" not in path.parts  # the emulated device registers itself with torch
)

OF_TORCH = {
    "_backward_hooks",
    "_backward_pre_hooks",
    "_base",
    "_buffers",
    "_cdata",
    "_compiled_call_impl",
    "_engine_run_backward",
    "_forward_hooks",
    "_forward_pre_hooks",
    "_fsdp_param_groups",
    "_get_fsdp_state",
    "_modules",
    "_non_persistent_buffers_set",
    "_overloadpacket",
    "_parameters",
    "_replicate_for_data_parallel",
    "_schema",
    "_sequence_nr",
    "_version",
}
"""Attributes of torch's objects, which are torch's wherever they stand on anything but `self`."""

OF_OTHERS = {
    "_asdict",
    "_backends",
    "_exit",
    "_fields",
    "_from_config",
    "_getframe",
    "_replace",
    "_set_gradient_checkpointing",
    "_supports_sdpa",
}
"""Private by their look, and not torch's: named tuples, the interpreter, transformers."""


def _dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _own_names(tree: ast.Module) -> set[str]:
    """Names that a file gives to attributes, functions, classes and fields of its own."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.attr)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
    return found


def _violations(text: str) -> list[str]:
    tree = ast.parse(text)
    own = _own_names(tree)
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            found += [f"{node.lineno}: imports {name}" for name in names if _is_private(name)]
        elif isinstance(node, ast.Import):
            names = [part for alias in node.names if alias.name.startswith("torch.") for part in alias.name.split(".")]
            found += [f"{node.lineno}: imports {name}" for name in names if _is_private(name)]
        elif isinstance(node, ast.Attribute) and _is_private(node.attr):
            owner = _dotted(node.value)
            is_operator = "aten" in owner.split(".")  # `aten._to_copy` is the name of an operator
            is_foreign = owner.startswith("torch") or node.attr in OF_TORCH or node.attr not in own
            if owner not in ("self", "cls") and not is_operator and is_foreign and node.attr not in OF_OTHERS:
                found.append(f"{node.lineno}: uses {_dotted(node) or node.attr}")
        elif isinstance(node, ast.Constant) and node.value in OF_TORCH:
            found.append(f"{node.lineno}: says {node.value!r}")
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_no_private_name_of_torch_outside_the_door(path: Path):
    assert _violations(path.read_text()) == []


@pytest.mark.parametrize(
    "line",
    [
        "from torch.utils import _pytree",
        "from torch.utils._python_dispatch import TorchDispatchMode",
        "import torch._dynamo",
        "torch._C._current_graph_task_id()",
        "tensor._version",
        "tensor.untyped_storage()._cdata",
        "node._sequence_nr()",
        "torch.utils.checkpoint._StopRecomputationError",
        "getattr(module, '_forward_hooks')",
    ],
)
def test_the_check_sees_a_private_name(line: str):
    assert _violations(line)


def test_ruff_bans_the_private_modules():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"]["lint"]
    banned = settings["flake8-tidy-imports"]["banned-api"]
    assert {"torch._C", "torch.utils._pytree", "torch.utils._python_dispatch"} <= set(banned)
    assert all("lowtide._torch" in entry["msg"] for entry in banned.values())
    assert "TID251" in settings["per-file-ignores"]["src/lowtide/_torch.py"]


ENTRIES = [
    node.name
    for node in ast.parse(DOOR.read_text()).body
    if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
]


@pytest.mark.parametrize("name", ENTRIES)
def test_an_entry_says_which_torch_has_it_and_what_would_replace_it(name: str):
    said = getattr(_torch, name).__doc__
    assert "2.1" in said
    assert "Public replacement" in said or "2.10 to 2.12" in said


def test_what_is_passed_on_is_explained_in_the_file_and_on_the_page():
    text, page = DOOR.read_text(), (ROOT / "docs" / "private-torch.md").read_text()
    for name in _torch.__all__:
        assert f"`{name}`" in text, name
        assert f"`{name}`" in page, name
