"""Writes docs/zoo.md from the records in docs/zoo: `python bench/zoo_page.py`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from lowtide.survey import Record
from lowtide.survey.summary import summarize

DOCS = Path(__file__).parent.parent / "docs"

INTRODUCTION = """\
Every architecture that could be built, tiny and with random weights, audited in training with dropout. What is listed
failed twice: with other weights and another batch, too. These are findings about tiny models on a CPU; each can be
repeated with the command in its row. This page is written by `bench/zoo_page.py` from [the records](zoo/{name})."""


def load(path: Path) -> list[Record]:
    return [Record(**record) for record in json.loads(path.read_text())["records"]]


def main() -> None:
    (DOCS / "zoo.md").write_text(from_records())


def from_records() -> str:
    (data,) = sorted((DOCS / "zoo").glob("transformers-*.json"))
    ours = DOCS / "zoo" / data.name.replace("transformers-", "lowtide-on-transformers-")
    version = data.stem.removeprefix("transformers-")
    return page(version, data.name, load(data), ours.name, load(ours))


def page(version: str, name: str, theirs: list[Record], our_name: str, ours: list[Record]) -> str:
    own, lowtide = summarize(theirs), summarize(ours)
    lines = [
        f"# The zoo: transformers {version}",
        "",
        INTRODUCTION.format(name=name),
        "",
        "## transformers' own checkpointing",
        "",
        *counts(own),
        "",
        "### What holds for most of them",
        "",
        *(f"- `{check}`: {own.by_check[check]} architectures. {example(theirs, check)}" for check in own.everywhere),
        "",
        "### Architecture by architecture",
        "",
        "| model type | class | mode: check | what was found | repeat with |",
        "|---|---|---|---|---|",
        *rows(theirs, own.everywhere),
        "",
        "## Lowtide's engine on the same models",
        "",
        *counts(lowtide),
        "",
        *our_failures(ours),
        "",
        *our_refusals(ours),
        "",
        f"[The records](zoo/{our_name}).",
        "",
        "## What could not be audited",
        "",
        "| model type | status | why |",
        "|---|---|---|",
        *(
            f"| {r.model_type} | {r.status} | {cell(r.why or '')} |"
            for r in theirs
            if r.status not in ("audited", "no checkpointing")
        ),
        "",
    ]
    return "\n".join(lines)


def counts(summary: object) -> list[str]:
    data = dataclasses.asdict(summary)  # type: ignore[call-overload]
    lines = ["| architectures | |", "|---|---|", f"| all | {data['total']} |"]
    return lines + [f"| {status} | {count} |" for status, count in data["by_status"].items()]


def rows(records: list[Record], everywhere: list[str]) -> list[str]:
    found = []
    for record in records:
        for failure in record.failures:
            check = f"{failure['mode']}: {failure['name']}"
            if check not in everywhere:
                start = f"| {record.model_type} | {record.model_class} | {check} "
                found.append(f"{start}| {cell(failure['summary'])} | `{record.command}` |")
    return found


def our_failures(records: list[Record]) -> list[str]:
    found = rows(records, [])
    if not found:
        return ["No check failed."]
    return ["| model type | class | policy: check | what was found | repeat with |", "|---|---|---|---|---|", *found]


def our_refusals(records: list[Record]) -> list[str]:
    """What the engine cannot do, it says: by name, with the reason."""
    refused = [record for record in records if record.status == "refused"]
    if not refused:
        return []
    return [
        "Refused by name:",
        "",
        "| model type | the error |",
        "|---|---|",
        *(f"| {record.model_type} | {cell(record.why or '')} |" for record in refused),
    ]


def example(records: list[Record], check: str) -> str:
    for record in records:
        for failure in record.failures:
            if f"{failure['mode']}: {failure['name']}" == check:
                return f"For example {record.model_type}: {cell(failure['summary'])}"
    return ""


def cell(text: str, most: int = 300) -> str:
    short = text if len(text) <= most else text[:most] + "…"
    return short.replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")


if __name__ == "__main__":
    main()
