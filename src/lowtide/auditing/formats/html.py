"""The report as a page: verdicts with their evidence, which blocks ran again, and what each of them held."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowtide.auditing.formats.memory_chart import memory_chart
from lowtide.auditing.verdicts import Verdict
from lowtide.report_page import render

if TYPE_CHECKING:
    from lowtide.auditing.verdicts import AuditReport, Check

_TEMPLATE = Path(__file__).parent / "templates" / "report.html"
_ORDER = (Verdict.FAIL, Verdict.INCONCLUSIVE, Verdict.PASS, Verdict.NOT_APPLICABLE)


def as_html(report: AuditReport) -> str:
    """One file that needs no network. Needs the `html` extra."""
    return render(
        _TEMPLATE,
        report=report,
        counts=_counts(report.checks),
        modes={mode: _worst_first(checks) for mode, checks in _by_mode(report).items()},
        maps={mode: _stacks(blocks) for mode, blocks in report.blocks.items() if blocks},
        chart=memory_chart(report.blocks),
    )


def _counts(checks: list[Check]) -> dict[str, int]:
    verdicts = [check.verdict for check in checks]
    return {str(verdict): verdicts.count(verdict) for verdict in _ORDER if verdict in verdicts}


def _by_mode(report: AuditReport) -> dict[str, list[Check]]:
    found: dict[str, list[Check]] = {}
    for check in report.checks:
        found.setdefault(check.mode, []).append(check)
    return found


def _worst_first(checks: list[Check]) -> list[Check]:
    """What needs a reader comes first; among equals the order of the report."""
    return sorted(checks, key=lambda check: _ORDER.index(check.verdict))


def _stacks(blocks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of the map. A cell goes by its name inside of the stack."""
    return [
        {
            "name": stack or "the model itself",
            "blocks": [block | {"label": block["name"].removeprefix(f"{stack}.")} for block in members],
        }
        for stack, members in itertools.groupby(blocks, key=lambda block: block["stack"])
    ]
