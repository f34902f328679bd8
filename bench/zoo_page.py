"""Write docs/zoo.md, and the table in docs/why.md, from the records in docs/zoo: `python bench/zoo_page.py`."""

from __future__ import annotations

import collections
import dataclasses
import json
import re
from pathlib import Path

from lowtide.auditing.grades import Grade
from lowtide.auditing.setups import MODES, PLAIN
from lowtide_zoo.records import NO_FAILURE, Pass, Record, summarize
from lowtide_zoo.survey import TILED

DOCS = Path(__file__).parent.parent / "docs"

INTRODUCTION = """\
We audited every architecture that could be built, tiny and with random weights, in training with dropout. What is
listed failed twice, the second time with different weights and a different batch. These are findings about tiny models
on a CPU; you can repeat each with the command in its row. `bench/zoo_page.py` writes this page from [the
records](zoo/{name})."""


IN_OTHER_WORDS = {
    "recomputed": "a stack of blocks is not recomputed, or too often: the flag has no effect there",
    "runs": "the plain model trains, but raises with the flag on",
    "gradient values": "a gradient has a different value, with no error",
    "gradients present": "a parameter gets no gradient any more",
    "adapters on a frozen base": "LoRA-like training of the blocks alone: no gradient, or an error",
    "buffers": "batch norm's statistics are updated twice",
    "DDP readiness": "DDP with `find_unused_parameters` would mark parameters ready twice",
}
"""The checks that docs/why.md shows, in plain words."""

GRADED = """\
A failure has a [grade](audit.md#grades). An architecture counts by its worst one in each mode:"""

_TABLE = re.compile(r"(?<=<!-- begin: zoo -->\n).*?(?=<!-- end: zoo -->)", flags=re.DOTALL)


def load(path: Path) -> list[Record]:
    return [Record(**record) for record in json.loads(path.read_text())["records"]]


def last_pass(path: Path) -> list[str]:
    """Say how long the survey took, if the file knows: older ones do not."""
    data = json.loads(path.read_text())["summary"].get("pass")
    return [f"The last pass: {Pass(**data)}.", ""] if data else []


def main() -> None:
    (DOCS / "zoo.md").write_text(from_records())
    why = DOCS / "why.md"
    why.write_text(with_table(why.read_text()))


def from_records() -> str:
    return page(*record_files())


def record_files() -> tuple[Path, Path]:
    """Return the files with the records of transformers' own checkpointing, and of Lowtide's."""
    (data,) = sorted((DOCS / "zoo").glob("transformers-*.json"))
    return data, DOCS / "zoo" / data.name.replace("transformers-", "lowtide-on-transformers-")


def with_table(text: str) -> str:
    """Return the text of docs/why.md with its table rewritten from the records."""
    theirs, ours = (summarize(load(path)) for path in record_files())
    lines = [
        "| what the audit found | transformers, default | transformers, reentrant | Lowtide |",
        "|---|---|---|---|",
        (
            f"| architectures audited | {theirs.by_status['audited']} | {theirs.by_status['audited']} "
            f"| {ours.by_status['audited']} |"
        ),
    ]
    for check, words in IN_OTHER_WORDS.items():
        default, reentrant = (theirs.by_check.get(f"{mode}: {check}", 0) for mode in ("default", "reentrant"))
        ours_fail = sum(count for name, count in ours.by_check.items() if name.endswith(f": {check}"))
        lines.append(f"| {words} | {default} | {reentrant} | {ours_fail} |")
    if PLAIN in modes_of(load(record_files()[0])):
        cut = theirs.by_check.get(f"{PLAIN}: parameters reached", 0)
        lines.append(f"| the plain model's own code cuts parameters off from the loss | {cut} | {cut} | |")
    lines.append(f"| `recompute` is refused by name, with the reason | | | {ours.by_status['refused']} |")
    lines += ["", what_was_applied(load(record_files()[1]))]
    return _TABLE.sub("\n" + "\n".join(lines) + "\n\n", text)


def what_was_applied(ours: list[Record]) -> str:
    """Say with which policies Lowtide was judged, and how many architectures took each."""
    modes = collections.Counter(mode for record in ours if record.status == "audited" for mode in record.verdicts)
    both, blocks, mlp, loss = (modes[policy] for policy in TILED)
    neither = modes["recompute"] - both - blocks - mlp - loss
    return (
        "Lowtide was judged with `recompute`, and with tiles of 8 tokens where the architecture takes them: "
        f"{both} take `tile`, {blocks} `tile(attention, mlp)`, {mlp} only `tile(mlp)`, {loss} only `tile(loss)`, and "
        f"{neither} none of them. Most of the "
        "latter have no language-model head and no separate MLP module. Offload is not part of the zoo, because it "
        "needs a device."
    )


def page(their_file: Path, our_file: Path) -> str:
    """Write the page from the records of transformers' own checkpointing, and of Lowtide's."""
    theirs, ours = load(their_file), load(our_file)
    own, lowtide = summarize(theirs), summarize(ours)
    lines = [
        f"# The zoo: transformers {their_file.stem.removeprefix('transformers-')}",
        "",
        INTRODUCTION.format(name=their_file.name),
        "",
        "## transformers' own checkpointing",
        "",
        *counts(own),
        "",
        *last_pass(their_file),
        GRADED,
        "",
        *grades(theirs),
        "",
        "### What holds for most of them",
        "",
        *(f"- `{check}`: {own.by_check[check]} architectures. {example(theirs, check)}" for check in own.everywhere),
        "",
        "### Architecture by architecture",
        "",
        "| architecture | class | grade | mode: check | what was found | repeat with |",
        "|---|---|---|---|---|---|",
        *rows(theirs, own.everywhere),
        "",
        "## Lowtide's engine on the same models",
        "",
        *counts(lowtide),
        "",
        *last_pass(our_file),
        what_was_applied(ours),
        "",
        *our_failures(ours),
        "",
        *our_refusals(ours),
        "",
        *tiled_blocks(ours),
        f"[The records](zoo/{our_file.name}).",
        "",
        "## What could not be audited",
        "",
        "| architecture | status | why |",
        "|---|---|---|",
        *(
            f"| {r.subject.name} | {r.status} | {cell(r.why or '')} |"
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


def grades(records: list[Record]) -> list[str]:
    """Return the table of architectures by the worst grade of their failures, in each mode and of the plain model."""
    modes = modes_of(records)
    worst = {mode: collections.Counter(r.worst_in(mode) for r in records if judged_in(r, mode)) for mode in modes}
    lines = [f"| worst grade | {' | '.join(modes)} |", f"|---|{'---|' * len(modes)}"]
    return lines + [
        f"| {grade or NO_FAILURE} | {' | '.join(str(worst[mode][grade]) for mode in modes)} |"
        for grade in (*reversed(Grade), None)
    ]


def modes_of(records: list[Record]) -> list[str]:
    """Return the modes of transformers' flag, and the plain model if the records judge it: older ones do not."""
    return [*MODES, *([PLAIN] if any(judged_in(record, PLAIN) for record in records) else [])]


def judged_in(record: Record, mode: str) -> bool:
    return PLAIN in record.verdicts if mode == PLAIN else record.status == "audited"


def rows(records: list[Record], everywhere: list[str]) -> list[str]:
    found = []
    for record in records:
        for failure in record.failures:
            check = f"{failure['mode']}: {failure['name']}"
            if check not in everywhere:
                doubt = "" if record.shown.get(check, True) else " (not shown by a script)"
                start = f"| {record.subject.name} | {record.model_class} | {failure['grade']} | {check} "
                found.append(f"{start}| {cell(failure['summary'])}{doubt} | `{record.command}` |")
    return found


def our_failures(records: list[Record]) -> list[str]:
    found = rows(records, [])
    if not found:
        return ["No check failed."]
    head = "| architecture | class | grade | policy: check | what was found | repeat with |"
    return [head, "|---|---|---|---|---|---|", *found]


def our_refusals(records: list[Record]) -> list[str]:
    """Return the table of models that the engine refuses by name, with the reason."""
    refused = [record for record in records if record.status == "refused"]
    if not refused:
        return []
    return [
        "Refused by name:",
        "",
        "| architecture | the error |",
        "|---|---|",
        *(f"| {record.subject.name} | {cell(record.why or '')} |" for record in refused),
    ]


def tiled_blocks(records: list[Record]) -> list[str]:
    """Return how many architectures run whole blocks in tiles, and why others do not."""
    tiled = [record for record in records if record.tiled_blocks]
    if not tiled:
        return []
    reasons: dict[str, set[str]] = collections.defaultdict(set)
    for record in records:
        for reason in record.left_alone.values():
            reasons[re.sub(r"\d+", "n", reason)].add(record.model_type)
    partly = sum(bool(record.left_alone) for record in tiled)
    others = sum(bool(record.left_alone) and not record.tiled_blocks for record in records)
    return [
        "### Attention in tiles",
        "",
        (
            f"{len(tiled)} architectures run blocks in tiles with their attention, {partly} of them not all of their "
            f"stacks; of {others}, all blocks are left alone. Which, and why:"
        ),
        "",
        "| reason | model types |",
        "|---|---|",
        *(
            f"| {cell(reason)} | {', '.join(sorted(types))} |"
            for reason, types in sorted(reasons.items(), key=lambda pair: (-len(pair[1]), pair[0]))
        ),
        "",
    ]


def example(records: list[Record], check: str) -> str:
    for record in records:
        for failure in record.failures:
            if f"{failure['mode']}: {failure['name']}" == check:
                return f"For example {record.subject.name}: {cell(failure['summary'])}"
    return ""


def cell(text: str, most: int = 300) -> str:
    short = text if len(text) <= most else text[:most] + "…"
    return short.replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")


if __name__ == "__main__":
    main()
