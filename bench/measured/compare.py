"""Plan every published run, and show what differs from the record: `python -m bench.measured.compare [NUMBER ...]`.

With numbers, only these runs are planned. `--store` writes the record, docs/plan-measured.md and its drawing. No plan
uses a published figure.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lowtide
from bench.charts import LINE_COLOURS, render
from bench.measured.runs import COMPILED_PAIRS, NOT_PLANNED, RUNS

if TYPE_CHECKING:
    from bench.measured.runs import Run

DOCS = Path(__file__).parents[2] / "docs"
DATA = DOCS / "plan-measured.json"
PAGE = DOCS / "plan-measured.md"
DRAWING = DOCS / "img" / "plan-measured.svg"

GIB = 2**30
AT_ONCE = 2

Record = dict[str, dict[str, Any]]
"""What was planned, by the number of the run: allocated and reserved bytes, seconds, and the bytes by owner."""

INTRODUCTION = """\
# Plans beside published measurements

Others measured the memory of training runs on GPUs and published it with enough settings to plan the same step. This
page compares {count} such figures with plans made on a machine without a GPU. `make plans-measured` plans them again
and says what differs; with `ARGS=--store` it writes this page. No plan uses a published figure. But settings that a
text leaves open (units, the type of the reduction, the allocator's segments, a fused loss) were sometimes found only
after a first plan had missed, and three runs of which too much is unsaid are not planned; so figures that nobody here
has seen are the harder test.

`allocated` is `torch.cuda.max_memory_allocated()` or the peak of active bytes. `reserved` is what the caching allocator
holds, which includes its fragmentation; the plan's figure is its model of that allocator. torchtitan's, litgpt's and
torchtune's models are small factories in `bench/measured/models.py`, written from what each framework's code computes;
others are configurations of transformers. A run marked `compiled` is planned if its blocks are recomputed, or if the
whole model is one graph of litgpt's: then norms, rotations and gated products keep what a fused kernel keeps, which is
an assumption about the compiler. Others are not planned. {compiled}

![Published against planned memory](img/plan-measured.svg)

## By kind

| kind | figures | median error | worst |
|---|---|---|---|
{groups}

An error is planned over published, less one: a plan that is too high is positive. The median is of the errors' sizes.

## Figure by figure

| run | measured | published | planned | error |
|---|---|---|---|---|
{rows}

What is known about a difference:

{notes}

## Seconds

Plans count kernels on a roofline, with typical efficiencies. Real steps also have data loading, hooks and kernels that
are launched late. Median of planned over published: {median_seconds:.2f}; for the {long_count} runs of a second or
more, {median_long:.2f}.

| run | published | planned | ratio |
|---|---|---|---|
{seconds}

## Not planned

| run | published | why |
|---|---|---|
{missing}

## Send a figure

`lowtide plan ... --policy P --format report` writes the settings and figures of a plan as JSON, with `measured` left
empty. Put `torch.cuda.max_memory_allocated()` and `torch.cuda.max_memory_reserved()` of your third step there and send
the file: `python -m bench.measured.reports FILE` shows it as a row of this page.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("numbers", nargs="*", type=int, metavar="NUMBER")
    parser.add_argument("--store", action="store_true")
    options = parser.parse_args()
    record = json.loads(DATA.read_text()) if DATA.exists() else {}
    runs = [run for run in RUNS if not options.numbers or run.number in options.numbers]
    distinct = list({run.number: run for run in runs}.values())
    found: Record = {}
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for planned_run, figures in zip(distinct, pool.map(planned, distinct), strict=True):
            found[str(planned_run.number)] = figures
            for run in (run for run in runs if run.number == planned_run.number):
                print(f"{run.name:14} {run.group:34} {run.what:60} {error(run, figures):+7.1%}", flush=True)
            for line in differences(record.get(str(planned_run.number), {}), figures):
                print(f"{'':14} {line}", flush=True)
    if options.store:
        store({**record, **found})


def differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Say what a plan has that the record has not."""
    return [
        f"{name}: {now[name]:,}, recorded {before[name]:,}"
        if name in before
        else f"{name}: {now[name]:,}, not recorded"
        for name in ("allocated", "reserved", "seconds")
        if before.get(name) != now[name]
    ]


def store(record: Record) -> None:
    """Write the record of the runs that are planned today, and the page and the drawing once it has them all."""
    numbers = sorted({run.number for run in RUNS})
    kept = {str(number): record[str(number)] for number in numbers if str(number) in record}
    DATA.write_text(json.dumps(kept, indent=1) + "\n")
    if len(kept) == len(numbers):
        PAGE.write_text(page(kept))
        DRAWING.write_text(drawing(kept))


def planned(run: Run) -> dict[str, Any]:
    """Plan the step of a run, with every layer simulated."""
    plan = lowtide.plan(run.model, policy=run.policy, cache=False, **run.settings)
    estimate = plan.candidates[0].estimate
    return {
        "allocated": estimate.peak_bytes,
        "reserved": estimate.reserved_bytes,
        "seconds": float(f"{estimate.seconds:.4g}"),
        "at": f"{estimate.phase} {estimate.region}".strip(),
        "owners": estimate.owners,
    }


def error(run: Run, figures: dict[str, Any]) -> float:
    """Return by how much the plan is too high, as a share of what was published."""
    return float(figures[run.measured] / GIB / run.gib - 1)


def page(record: Record) -> str:
    """Write the page from the record."""
    groups: dict[str, list[float]] = defaultdict(list)
    for run in RUNS:
        groups[run.group].append(error(run, record[str(run.number)]))
    timed = [(run, record[str(run.number)]["seconds"] / run.seconds) for run in RUNS if run.seconds]
    long = [ratio for run, ratio in timed if run.seconds and run.seconds >= 1 and not run.compiled]
    return INTRODUCTION.format(
        compiled=compiled_range(),
        count=len(RUNS),
        groups="\n".join(_group_row(name, errors) for name, errors in groups.items()),
        rows="\n".join(row(run, record[str(run.number)]) for run in RUNS),
        median_seconds=statistics.median(ratio for _, ratio in timed),
        median_long=statistics.median(long),
        long_count=len(long),
        seconds="\n".join(
            f"| {_linked(run)} | {run.seconds:.3g} s | {record[str(run.number)]['seconds']:.3g} s | {ratio:.2f} |"
            for run, ratio in timed
        ),
        notes="\n".join(f"- {_linked(run)}: {run.note}." for run in RUNS if run.note),
        missing="\n".join(
            f"| {_linked(run)} | {run.gib:.2f} GiB {run.measured} | {run.why_not} |" for run in NOT_PLANNED
        ),
    )


def compiled_range() -> str:
    """Say what compiled runs held of what the same runs held without, by the published figures alone."""
    gib = {run.name: run.gib for run in (*RUNS, *NOT_PLANNED)}
    shares = [gib[compiled] / gib[eager] for compiled, eager in COMPILED_PAIRS]
    return (
        f"In the {len(shares)} pairs of published runs that differ in `torch.compile` alone, the compiled one held "
        f"{min(shares):.0%} to {max(shares):.0%} of the other's memory."
    )


def _group_row(name: str, errors: list[float]) -> str:
    sizes = [abs(value) for value in errors]
    return f"| {name} | {len(errors)} | {statistics.median(sizes):.1%} | {max(errors, key=abs):+.1%} |"


def row(run: Run, figures: dict[str, Any]) -> str:
    """Write a row of the table."""
    gib = figures[run.measured] / GIB
    return f"| {_linked(run)} | {run.group} | {run.gib:.2f} GiB | {gib:.2f} GiB | {error(run, figures):+.1%} |"


def _linked(run: Run) -> str:
    return f"[{run.what}]({run.source})"


# --- The drawing ----------------------------------------------------------------------------------------------------

_LEAST, _MOST = 2.0, 128.0
_LEFT, _TOP, _SIZE = 60, 40, 360


def drawing(record: Record) -> str:
    """Draw published against planned memory, on logarithmic axes."""
    groups = list(dict.fromkeys(run.group for run in RUNS))
    colours = {group: LINE_COLOURS[place % len(LINE_COLOURS)] for place, group in enumerate(groups)}
    points = [
        {
            "x": _place(run.gib),
            "y": _upwards(record[str(run.number)][run.measured] / GIB),
            "colour": colours[run.group],
            "hollow": run.measured == "reserved",
            "title": f"{run.what}: {run.gib:.2f} GiB published, {error(run, record[str(run.number)]):+.1%}",
        }
        for run in RUNS
    ]
    ticks = [{"text": f"{gib}", "x": _place(gib), "y": _upwards(gib)} for gib in (4, 8, 16, 32, 64)]
    legend = [
        {"text": group, "colour": colours[group], "y": _TOP + 14 + 20 * place, "hollow": "reserved" in group}
        for place, group in enumerate(groups)
    ]
    frame = {"left": _LEFT, "right": _LEFT + _SIZE, "top": _TOP, "bottom": _TOP + _SIZE}
    return render("scatter.svg", points=points, ticks=ticks, legend=legend, frame=frame)


def _share(gib: float) -> float:
    return math.log(gib / _LEAST) / math.log(_MOST / _LEAST)


def _place(gib: float) -> str:
    return f"{_LEFT + _SIZE * _share(gib):.1f}"


def _upwards(gib: float) -> str:
    return f"{_TOP + _SIZE * (1 - _share(gib)):.1f}"


if __name__ == "__main__":
    main()
