"""The user's side of the planning process."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowtide import errors
from lowtide.errors import PlanError

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from lowtide.hardware.accelerators import Accelerator
    from lowtide.simulation.estimate import Estimate
    from lowtide.simulation.region_costs import StepCosts
    from lowtide.simulation.simulator import ModelSummary
    from lowtide.targets.job import Job
    from lowtide.targets.target import Target


class SimulatorProcess:
    """A `Simulator` in a process of its own. Leaving the context ends it, however it is left."""

    def __init__(self, target: Target, job: Job, accelerator: Accelerator) -> None:
        self._opening = (target, job, accelerator)
        self._facts: ModelSummary | None = None

    def __enter__(self) -> Self:
        self._errors = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "lowtide.simulation.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(_import_path()), "CUDA_VISIBLE_DEVICES": ""},
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.communicate()
        self._errors.close()

    def change_job(self, job: Job) -> None:
        """The same model with another job: the process stays."""
        target, _, accelerator = self._opening
        self._opening = (target, job, accelerator)
        self._facts = None

    @property
    def summary(self) -> ModelSummary:
        if self._facts is None:
            self._facts = self._ask("open", self._opening)
        return self._facts

    def estimate(self, policy: str, *, exact: bool) -> Estimate:
        _ = self.summary
        return self._ask("estimate", {"policy": policy, "exact": exact})  # type: ignore[no-any-return]

    def costs(self, tile: str) -> StepCosts:
        _ = self.summary
        return self._ask("costs", {"tile": tile})  # type: ignore[no-any-return]

    def _ask(self, name: str, arguments: Any) -> Any:
        assert self._process.stdin is not None  # noqa: S101
        assert self._process.stdout is not None  # noqa: S101
        try:
            pickle.dump((name, arguments), self._process.stdin)
            self._process.stdin.flush()
            status, content = pickle.load(self._process.stdout)  # noqa: S301  (from our own child)
        except (EOFError, BrokenPipeError) as error:
            raise PlanError(f"the planning process died{self._last_words()}") from error
        if status == "refused":
            kind, message = content
            raise getattr(errors, kind, PlanError)(message)
        if status == "failed":
            raise PlanError(f"the step could not be simulated: {content}{self._likely_reason()}")
        return content

    def _likely_reason(self) -> str:
        _, job, _ = self._opening
        too_long = self._facts.too_long(job.tokens) if self._facts is not None else None
        return f" ({too_long}: plan for fewer, or ask for the largest batch)" if too_long else ""

    def _last_words(self) -> str:
        self._process.wait()
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return f" with exit code {self._process.returncode}" + (f": {lines[-1]}" if lines else "")


def _import_path() -> list[str]:
    """What the user can import, the planning process can import too."""
    return [entry or str(Path.cwd()) for entry in sys.path]
