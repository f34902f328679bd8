"""The report as plain text: a line per check, remedies under what failed."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lowtide.auditing.verdicts import AuditReport

SIGNS = {"pass": "ok", "fail": "FAIL", "inconclusive": "?", "not applicable": "-"}


def as_text(report: AuditReport) -> str:
    lines = [f"{report.model}: {'ok' if report.ok else 'not ok'}"]
    for mode, checks in itertools.groupby(report.checks, key=lambda check: check.mode):
        lines.append(f"[{mode}]")
        for check in checks:
            lines.append(f"  {SIGNS[check.verdict]:<5} {check.name}: {check.summary}")
            if check.verdict in ("fail", "inconclusive") and check.remedy:
                lines.append(f"        remedy: {check.remedy}")
    return "\n".join(lines)
