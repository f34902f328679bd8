"""Keeps results on disk by content: the same model, job, accelerator, policy and versions give the same figures.

The key includes a fingerprint of Lowtide's own sources, so that results of a different version are never read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import operator
import os
import tempfile
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowtide._version import __version__
from lowtide.policy import Policy
from lowtide.simulation.estimate import Estimate
from lowtide.simulation.process import SimulatorProcess
from lowtide.simulation.region_costs import RegionCosts, RegionPolicyCost, StepCosts
from lowtide.simulation.simulator import ModelSummary
from lowtide.user_cache import user_cache

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType
    from typing import Self

    from lowtide.hardware.accelerators import Accelerator
    from lowtide.targets.job import Job
    from lowtide.targets.target import Target

logger = logging.getLogger(__name__)

PROCESSES = 2
"""How many processes simulate side by side. Policies that tile whole blocks take about as long as all the rest."""


def cache_directory() -> Path:
    """Return the directory in which results are kept."""
    return user_cache() / "plans"


class CachedSimulator:
    """Simulator processes that are only started for results that are not known yet."""

    def __init__(self, target: Target, job: Job, accelerator: Accelerator, *, enabled: bool) -> None:
        self._processes = [SimulatorProcess(target, job, accelerator) for _ in range(PROCESSES)]
        self._running = contextlib.ExitStack()
        self._started: set[int] = set()
        self._enabled = enabled and target.kind != "factory"  # a function may build something else tomorrow
        content = hashlib.sha256(target.content).hexdigest()
        self._fixed = [content, target.kind, target.name, accelerator.to_dict(), _versions()]
        self._job = job
        self.builds_model = target.kind in ("config", "model type")
        """Whether the model is built here, so that it can have adapters or a 4-bit base."""
        self.warning: str | None = None
        """Why results cannot be kept, if they cannot; they are used all the same."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._running.close()

    def change_job(self, job: Job) -> None:
        """Simulate a different job of the same model from now on."""
        self._job = job
        for process in self._processes:
            process.change_job(job)

    def stop(self) -> None:
        """End the processes now; whoever waits for an answer gets an error."""
        self._running.close()

    @property
    def summary(self) -> ModelSummary:
        return ModelSummary(**self._remember("summary", {}, 0, lambda simulator: dataclasses.asdict(simulator.summary)))

    def estimate(self, policy: str, *, exact: bool) -> Estimate:
        asked = {"policy": policy, "exact": exact}
        ask = operator.methodcaller("estimate", policy, exact=exact)
        return Estimate(
            **self._remember("estimate", asked, process_for(policy), lambda simulator: ask(simulator).to_dict())
        )

    def costs(self, tile: str, policies: tuple[str, ...]) -> StepCosts:
        asked = {"tile": tile, "policies": policies}
        ask = operator.methodcaller("costs", tile, policies)
        data = self._remember("costs", asked, process_for(tile), lambda simulator: dataclasses.asdict(ask(simulator)))
        return StepCosts(**{**data, "regions": [_region_costs(region) for region in data["regions"]]})

    def _remember(
        self, what: str, asked: dict[str, Any], process: int, ask: Callable[[SimulatorProcess], dict[str, Any]]
    ) -> dict[str, Any]:
        """Return a kept result, or ask one of the processes and keep its answer."""
        if not self._enabled:
            return ask(self._started_process(process))
        text = json.dumps([what, asked, self._job.to_dict(), *self._fixed], sort_keys=True, default=str)
        path = cache_directory() / f"{hashlib.sha256(text.encode()).hexdigest()}.json"
        data = _read(path)
        if data is None:
            data = ask(self._started_process(process))
            self._keep(path, json.dumps(data))
        return data

    def _keep(self, path: Path, text: str) -> None:
        if self.warning is not None:
            return
        try:
            _write(path, text)
        except OSError as error:
            self.warning = (
                f"results cannot be kept in {path.parent} ({error.strerror}): set LOWTIDE_CACHE to a directory that "
                "can be written, or plan without a cache"
            )
            logger.warning("%s", self.warning)

    def _started_process(self, number: int) -> SimulatorProcess:
        if number not in self._started:
            self._running.enter_context(self._processes[number])
            self._started.add(number)
        return self._processes[number]


def process_for(policy: str) -> int:
    """Return the number of the process that simulates a policy: policies that share recordings share a process."""
    parsed = Policy.parse(policy or "none")
    return int("attention" in parsed.tile)


def _region_costs(data: dict[str, Any]) -> RegionCosts:
    by_policy = {policy: RegionPolicyCost(**cost) for policy, cost in data["by_policy"].items()}
    return RegionCosts(**{**data, "by_policy": by_policy})


def _read(path: Path) -> dict[str, Any] | None:
    """Return a kept result; None if there is none, or if it cannot be read."""
    try:
        data: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return data


def _write(path: Path, text: str) -> None:
    """Write a result whole or not at all: an interrupted plan leaves no half of one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".part")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {"lowtide": f"{__version__} {_source_fingerprint()}"}
    for package in ("torch", "transformers", "peft"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found


def _source_fingerprint() -> str:
    """Return a fingerprint of Lowtide's sources: while it is developed, its version says nothing."""
    root = Path(__file__).parent.parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
