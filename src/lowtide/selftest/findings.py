"""Collects the rows of a stage. Each is guarded: what one row raises is that row's finding, and the rest still run.

Two things end a stage before its last row: its time is up, or the device no longer answers, as after a CUDA error that
sticks to the process. What was left out for it is named in one row, which proves nothing.
"""

from __future__ import annotations

import dataclasses
import gc
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from lowtide.auditing.grades import Grade
from lowtide.auditing.result import Verdict, listed
from lowtide.selftest.bench import give_back
from lowtide.selftest.record import Row, StageResult, without_paths

if TYPE_CHECKING:
    from collections.abc import Callable

    from lowtide.selftest.bench import Bench

T = TypeVar("T")


@dataclasses.dataclass(kw_only=True)
class Findings:
    """The rows of one stage, as they are found."""

    bench: Bench
    rows: list[Row] = dataclasses.field(default_factory=list)
    left_out: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    """The names of what was not run, by the reason."""

    def attempt(self, name: str, run: Callable[..., T], *arguments: Any, grade: Grade = Grade.WRONG) -> T | None:
        """Return what `run` returns; None if it raised or was left out, which a row then says.

        A step that raises is wrong, as in the audit; `grade` says what it means if no step of training is at fault.
        """
        why = self.bench.limits.reached
        if why:
            self.leave_out(name, why)
            return None
        try:
            return run(*arguments)
        except torch.OutOfMemoryError as error:
            said = f"the device has too little free memory for it: {error}"
            self.rows.append(Row(name=name, verdict=Verdict.INCONCLUSIVE, summary=without_paths(said)))
        except Exception as error:  # noqa: BLE001  (whatever the engine raises is the finding)
            said = f"it raises {type(error).__name__}: {error}"
            self.rows.append(Row(name=name, verdict=Verdict.FAIL, grade=grade, summary=without_paths(said)))
        gc.collect()
        self.bench.limits.lost = self.bench.limits.lost or give_back(self.bench.device)
        return None

    def add(self, name: str, run: Callable[..., Row], *arguments: Any, grade: Grade = Grade.WRONG) -> None:
        """Add the row that `run` returns, or one that says why there is none."""
        row = self.attempt(name, run, *arguments, grade=grade)
        if row is not None:
            self.rows.append(row)

    def leave_out(self, name: str, why: str) -> None:
        """Note that something was not run."""
        names = self.left_out.setdefault(why, [])
        if name not in names:
            names.append(name)

    def unproven(self, name: str, why: str) -> None:
        """Add a row that proves nothing, because what it needs could not be measured."""
        self.rows.append(Row(name=name, verdict=Verdict.INCONCLUSIVE, summary=why))

    def stage(self, name: str, *, why: str = "") -> StageResult:
        """Return all that was found."""
        rest = [
            Row(
                name=f"left out: {reason}",
                verdict=Verdict.INCONCLUSIVE,
                summary=listed(names),
                figures={"left_out": names},
            )
            for reason, names in self.left_out.items()
        ]
        return StageResult(name=name, rows=[*self.rows, *rest], why=why)
