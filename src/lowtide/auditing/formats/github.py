"""The report as workflow commands of GitHub Actions: printed in a job, they become annotations of its run.

Failures are errors, what could not be told is a warning, and one notice sums up. GitHub shows ten errors and ten
warnings of a step as annotations; the others stand in its log, and the notice counts all of them.
"""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING

from lowtide.auditing.formats.evidence import details
from lowtide.auditing.verdicts import Verdict

if TYPE_CHECKING:
    from lowtide.auditing.verdicts import AuditReport, Check

_COMMANDS = {Verdict.FAIL: "error", Verdict.INCONCLUSIVE: "warning"}


def as_github(report: AuditReport) -> str:
    lines = [_annotation(report, check) for check in report.checks if check.verdict in _COMMANDS]
    return "\n".join([*lines, _summary(report)])


def _annotation(report: AuditReport, check: Check) -> str:
    title = f"{report.model} [{check.mode}] {check.name}"
    message = f"{check.summary}\n{details(check)}".rstrip()
    return _command(_COMMANDS[check.verdict], title, message)


def _summary(report: AuditReport) -> str:
    counts = collections.Counter(check.verdict for check in report.checks)
    verdicts = ", ".join(f"{counts[verdict]} {verdict}" for verdict in Verdict if counts[verdict])
    state = "ok" if report.ok else "not ok"
    return _command("notice", f"lowtide audit of {report.model}", f"{state}: {verdicts or 'no check was run'}")


def _command(name: str, title: str, message: str) -> str:
    return f"::{name} title={_property(title)}::{_data(message)}"


def _data(text: str) -> str:
    """A command is one line; the percent sign comes first, because it starts the escapes."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
