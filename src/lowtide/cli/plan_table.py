"""Prints plans: the headline, the table of policies, the recommendations with the lines to paste, the notes.

Every table fits the width of the terminal, or 80 columns of a pipe. Policies and figures are never cut: a long policy
is wrapped, and the reason gets the room that is left; where that is little, it says how much is too much, in figures.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table

from lowtide.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from lowtide.planning import Candidate, Plan
    from lowtide.planning.max_fit import MaxFit
    from lowtide.planning.result import WayOut
    from lowtide.simulation.estimate import Estimate

_POLICY = len("recompute+offload+tile(loss)")
"""The least width of the column of policies. Longer ones are broken before a plus sign."""
_SENTENCE = 40
"""From this many columns on, there is a column with a sentence about each policy."""
_MISSING = "too much"
_GAP = 2
"""Spaces between two columns of a table."""

_COLOURS = {"fits": "green", "tight": "yellow", "no": "red"}


def headline(plan: Plan) -> str:
    """Return what was asked, in a line: the model, what is trained, the step and the device."""
    job, summary = plan.job, plan.summary
    parts = (escape(summary.name), job.training, job.size, plan.where, format_bytes(plan.budget))
    return f"[bold]{parts[0]}[/] ({summary.parameters / 1e9:.3g} billion weights), {', '.join(parts[1:])}"


def print_plan(plan: Plan, console: Console, ways_out: Sequence[tuple[str, WayOut]]) -> None:
    """Print a plan; `ways_out` are commands for what would fit where nothing does."""
    from lowtide.planning.page import code_for

    if plan.candidates:
        console.print(table_of(plan.candidates, console, {candidate.policy for _, candidate in plan.recommended}))
    for why, candidate in plan.recommended:
        step = f"{format_bytes(candidate.device_bytes)}, {format_seconds(candidate.estimate.seconds)}"
        console.print(f"\n[dim]{why} ({step}):[/]")
        console.print(f"[bold green]{escape(code_for(candidate))}[/]", soft_wrap=True)
    if plan.recommended and plan.why_not_faster:
        console.print(f"[dim]why nothing faster: {escape(plan.why_not_faster)}[/]")
    if plan.why_nothing_fits is not None:
        console.print(f"\n[bold red]nothing fits[/]: {escape(plan.why_nothing_fits)}")
        _print_ways_out(console, ways_out)
    for note in plan.notes:
        console.print(f"[dim]note: {escape(note)}[/]")


def _print_ways_out(console: Console, ways_out: Sequence[tuple[str, WayOut]]) -> None:
    if ways_out:
        console.print("\nwhat would fit:")
    for command, way in ways_out:
        console.print(f"[bold green]{escape(command)}[/]", soft_wrap=True)
        console.print(f"  [dim]{format_bytes(way.device_bytes)} with {escape(way.policy)}[/]")


def table_of(candidates: Sequence[Candidate], console: Console, best: set[str] = frozenset()) -> Table:  # type: ignore[assignment]
    """Make the table of candidates; those whose policy is among the `best` are bold."""
    bare = _table_with(candidates, console, 0, best)
    room = console.width - Measurement.get(console, console.options, bare).maximum - _GAP
    return _table_with(candidates, console, room, best) if room >= len(_MISSING) else bare


def _table_with(candidates: Sequence[Candidate], console: Console, room: int, best: set[str]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("", no_wrap=True)
    _add_columns(table, console)
    is_wide = room >= _SENTENCE
    if room:
        table.add_column("at the peak" if is_wide else _MISSING, max_width=room, justify="left" if is_wide else "right")
    for candidate in candidates:
        text = _policy_text(candidate.policy, console)
        table.add_row(
            f"[{_COLOURS[candidate.verdict]}]{candidate.verdict}[/]",
            f"[bold]{text}[/]" if candidate.policy in best else text,
            *_figures(candidate.device_bytes, candidate.estimate),
            *([escape(candidate.limit if is_wide else candidate.missing)] if room else []),
        )
    return table


def _add_columns(table: Table, console: Console, *before: str) -> None:
    """Add the columns that both tables have. A policy longer than a third of the line is wrapped, never cut."""
    table.add_column("policy", overflow="fold", max_width=_policy_width(console))
    for heading in (*before, "device", "host", "step"):
        table.add_column(heading, justify="right", no_wrap=True)


def _policy_width(console: Console) -> int:
    return max(_POLICY, console.width // 3)


def _policy_text(policy: str, console: Console) -> str:
    """Break a policy into lines that the column has room for: between its rules, and before a plus sign."""
    lines = [""]
    for part in re.findall(r"\+?[^+ ]+ ?", policy):
        if lines[-1] and len(lines[-1]) + len(part.rstrip()) > _policy_width(console):
            lines.append("")
        lines[-1] += part
    return escape("\n".join(line.rstrip() for line in lines))


def _figures(device_bytes: int, estimate: Estimate) -> tuple[str, str, str]:
    """Format a policy's figures for both tables: device memory with its margins, host memory, seconds of a step."""
    host = format_bytes(estimate.host_bytes) if estimate.host_bytes else ""
    return format_bytes(device_bytes), host, format_seconds(estimate.seconds)


def print_largest(found: Sequence[MaxFit], dimension: str, console: Console, headroom: float) -> None:
    """Print the table of the longest sequences, or of the largest batches."""
    console.print(largest_table_of(found, dimension, console))
    if beyond := next((row.positions for row in found if row.positions), None):
        console.print(
            f"[dim]* more than the {beyond:,} positions that the model's configuration names: it was not made for such "
            "lengths[/]"
        )
    if headroom:
        console.print(
            f"[dim]note: each leaves {100 * headroom:.3g} % of the memory free, as the policies of a plan that fit "
            "(--headroom)[/]"
        )


def largest_table_of(found: Sequence[MaxFit], dimension: str, console: Console) -> Table:
    """Make that table."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    _add_columns(table, console, "tokens" if dimension == "tokens" else "batch size")
    for row in found:
        if row.estimate is None or row.device_bytes is None:
            table.add_row(_policy_text(row.policy, console), "none fits")
            continue
        most = f"{row.most:,}{'*' if row.positions else ''}"
        table.add_row(_policy_text(row.policy, console), most, *_figures(row.device_bytes, row.estimate))
    return table
