"""Results by content: the same model, job, accelerator, policy and versions give the same figures, so they are kept."""

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

LANES = 2
"""Processes that simulate side by side. Tiling everything takes about as long as all the rest."""


def cache_directory() -> Path:
    """Where plans are kept."""
    return user_cache() / "plans"


class CachedSimulator:
    """Remote studios that are only started for what is not known yet."""

    def __init__(self, target: Target, job: Job, accelerator: Accelerator, *, enabled: bool) -> None:
        self._remotes = [SimulatorProcess(target, job, accelerator) for _ in range(LANES)]
        self._running = contextlib.ExitStack()
        self._started: set[int] = set()
        self._enabled = enabled and target.kind != "factory"  # a function may build something else tomorrow
        content = hashlib.sha256(target.content).hexdigest()
        self._same = [content, target.kind, target.name, accelerator.to_dict(), _versions()]
        self._job = job
        self.trouble: str | None = None
        """Why results are not kept, if they cannot be. They are used all the same."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._running.close()

    def change_job(self, job: Job) -> None:
        """From now on figures are those of another job."""
        self._job = job
        for remote in self._remotes:
            remote.change_job(job)

    def stop(self) -> None:
        """End the processes now: whoever waits for one of them hears of it."""
        self._running.close()

    @property
    def summary(self) -> ModelSummary:
        return ModelSummary(**self._known("summary", {}, 0, lambda simulator: dataclasses.asdict(simulator.summary)))

    def estimate(self, policy: str, *, exact: bool) -> Estimate:
        asked = {"policy": policy, "exact": exact}
        ask = operator.methodcaller("estimate", policy, exact=exact)
        return Estimate(**self._known("estimate", asked, lane_of(policy), lambda simulator: ask(simulator).to_dict()))

    def costs(self, tile: str) -> StepCosts:
        data = self._known(
            "costs", {"tile": tile}, lane_of(tile), lambda simulator: dataclasses.asdict(simulator.costs(tile))
        )
        regions = [
            RegionCosts(
                **{
                    **region,
                    "treatments": {name: RegionPolicyCost(**cost) for name, cost in region["treatments"].items()},
                }
            )
            for region in data["regions"]
        ]
        return StepCosts(**{**data, "regions": regions})

    def _known(
        self, what: str, asked: dict[str, Any], lane: int, ask: Callable[[SimulatorProcess], dict[str, Any]]
    ) -> dict[str, Any]:
        if not self._enabled:
            return ask(self._remote(lane))
        text = json.dumps([what, asked, self._job.to_dict(), *self._same], sort_keys=True, default=str)
        path = cache_directory() / f"{hashlib.sha256(text.encode()).hexdigest()}.json"
        data = _read(path)
        if data is None:
            data = ask(self._remote(lane))
            self._keep(path, json.dumps(data))
        return data

    def _keep(self, path: Path, text: str) -> None:
        if self.trouble is not None:
            return
        try:
            _write(path, text)
        except OSError as error:
            self.trouble = (
                f"results cannot be kept in {path.parent} ({error.strerror}): set LOWTIDE_CACHE to a directory that "
                "can be written, or plan without a cache"
            )
            logger.warning("%s", self.trouble)

    def _remote(self, lane: int) -> SimulatorProcess:
        if lane not in self._started:
            self._running.enter_context(self._remotes[lane])
            self._started.add(lane)
        return self._remotes[lane]


def lane_of(policy: str) -> int:
    """Which of the processes looks at a policy: what shares recordings shares a process."""
    return int("tile" in policy and "tile(loss)" not in policy)


def _read(path: Path) -> dict[str, Any] | None:
    """What is known; None if nothing is, or if it cannot be read."""
    try:
        data: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return data


def _write(path: Path, text: str) -> None:
    """All of it or nothing: a plan that is interrupted leaves no half of a result."""
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
    found: dict[str, str | None] = {"lowtide": f"{__version__} {_own_source()}"}
    for package in ("torch", "transformers", "peft"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found


def _own_source() -> str:
    """A fingerprint of the package: while it is worked on, its version says nothing."""
    root = Path(__file__).parent.parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
