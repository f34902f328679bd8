"""Evidence as indented lines, one value each, for formats that hold plain text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lowtide.auditing.verdicts import Check

_STEP = "  "


def as_lines(evidence: dict[str, Any]) -> list[str]:
    """`lost: 2 names` as a heading with a line per name under it; what has no content says so."""
    return list(_of_mapping(evidence, ""))


def details(check: Check) -> str:
    """Everything below a check's summary: the evidence, and the remedy if there is one."""
    lines = as_lines(check.evidence)
    if check.remedy:
        lines.append(f"remedy: {check.remedy}")
    return "\n".join(lines)


def _of_mapping(mapping: dict[str, Any], indent: str) -> Iterator[str]:
    for key, value in mapping.items():
        if _is_nested(value):
            yield f"{indent}{key}:"
            yield from _of(value, indent + _STEP)
        else:
            yield f"{indent}{key}: {_flat(value)}"


def _of(value: Any, indent: str) -> Iterator[str]:
    if isinstance(value, dict):
        yield from _of_mapping(value, indent)
        return
    for item in value:
        if _is_nested(item):
            first, *rest = _of(item, indent + _STEP)
            yield f"{indent}- {first.lstrip()}"
            yield from rest
        else:
            yield f"{indent}- {_flat(item)}"


def _is_nested(value: Any) -> bool:
    """A list of numbers reads better in one line."""
    if isinstance(value, dict):
        return bool(value)
    return isinstance(value, list | tuple) and any(not isinstance(item, int | float) for item in value)


def _flat(value: Any) -> str:
    if isinstance(value, list | tuple | dict):
        return ", ".join(map(str, value)) or "none"
    return str(value)
