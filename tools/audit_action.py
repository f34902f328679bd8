"""Audit a target for the GitHub Action: annotations on stdout, a comment and a badge in files, the audit's exit code.

    python tools/audit_action.py FOLDER TARGET [options of lowtide audit]

The audit runs once, in a process of its own. FOLDER gets `report.json`, `comment.md` and `badge.json`.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from lowtide.auditing import AuditReport
from lowtide.auditing.ci import as_badge, as_github, as_markdown

MARK = "<!-- lowtide audit of {target} -->"
"""The first line of the comment, by which the action finds the one that it wrote before."""


def main(folder: Path, target: str, options: list[str]) -> int:
    path = folder / "report.json"
    command = [sys.executable, "-m", "lowtide", "audit", target, *options, "--format", "json", "-o", str(path)]
    code = subprocess.run(command, check=False).returncode
    if code not in (0, 1):
        return code
    report = AuditReport.from_json(path.read_text())
    sys.stdout.write(as_github(report) + "\n")
    (folder / "comment.md").write_text(f"{MARK.format(target=target)}\n{as_markdown(report)}\n")
    (folder / "badge.json").write_text(as_badge(report) + "\n")
    return code


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:]))
