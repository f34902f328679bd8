"""The user's side of the worker process: starts it, asks it, and ends it."""

from __future__ import annotations

import logging
import os
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowtide.errors import PlanError, by_name

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from lowtide.hardware.accelerators import Accelerator
    from lowtide.simulation.estimate import Estimate
    from lowtide.simulation.region_costs import StepCosts
    from lowtide.simulation.simulator import ModelSummary
    from lowtide.targets.job import Job
    from lowtide.targets.target import Target


logger = logging.getLogger(__name__)


class SimulatorProcess:
    """A `Simulator` in a separate process. Leaving the context ends the process, after an error too."""

    def __init__(self, target: Target, job: Job, accelerator: Accelerator) -> None:
        self._opening = (target, job, accelerator)
        self._summary: ModelSummary | None = None

    def __enter__(self) -> Self:
        self._stderr = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            # -P: a file in the current folder must not hide a package
            [sys.executable, "-P", "-m", "lowtide.simulation.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(_import_path()), "CUDA_VISIBLE_DEVICES": ""},
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.communicate()
        self._stderr.close()

    def change_job(self, job: Job) -> None:
        """Simulate a different job of the same model from now on; the process stays."""
        target, _, accelerator = self._opening
        self._opening = (target, job, accelerator)
        self._summary = None

    def change_accelerator(self, accelerator: Accelerator) -> None:
        """Simulate a different accelerator from now on; the process stays."""
        target, job, _ = self._opening
        self._opening = (target, job, accelerator)
        self._summary = None

    @property
    def summary(self) -> ModelSummary:
        if self._summary is None:
            self._summary = self._ask("open", self._opening)
        return self._summary

    def estimate(self, policy: str, *, exact: bool) -> Estimate:
        _ = self.summary
        return self._ask("estimate", {"policy": policy, "exact": exact})  # type: ignore[no-any-return]

    def costs(self, tile: str, policies: tuple[str, ...]) -> StepCosts:
        _ = self.summary
        return self._ask("costs", {"tile": tile, "policies": policies})  # type: ignore[no-any-return]

    def _ask(self, name: str, arguments: Any) -> Any:
        assert self._process.stdin is not None  # noqa: S101
        assert self._process.stdout is not None  # noqa: S101
        try:
            pickle.dump((name, arguments), self._process.stdin)
            self._process.stdin.flush()
            status, content, trace = pickle.load(self._process.stdout)  # noqa: S301  (from our own child)
        except (EOFError, BrokenPipeError) as error:
            raise PlanError(f"the planning process died{self._exit_reason()}") from error
        if trace is not None:
            logger.debug("in the planning process:\n%s", trace.rstrip())
        if status == "refused":
            kind, message = content
            raise by_name(kind)(message)
        if status == "failed":
            raise PlanError(
                f"the step could not be simulated: {content}{self._likely_reason()} (lowtide -v shows where)"
            )
        return content

    def _likely_reason(self) -> str:
        _, job, _ = self._opening
        too_long = self._summary.too_long(job.tokens) if self._summary is not None else None
        return f" ({too_long}: plan for fewer, or ask for the largest batch)" if too_long else ""

    def _exit_reason(self) -> str:
        self._process.wait()
        self._stderr.seek(0)
        lines = self._stderr.read().decode(errors="replace").strip().splitlines()
        return f" with exit code {self._process.returncode}" + (f": {lines[-1]}" if lines else "")


def _import_path() -> list[str]:
    """Return the module search path with which the worker can import whatever the user's process can."""
    return [entry or str(Path.cwd()) for entry in sys.path]
