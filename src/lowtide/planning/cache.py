"""Results by content: the same model, job, accelerator, policy and versions give the same figures, so they are kept."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import tempfile
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowtide._version import __version__
from lowtide.planning.estimate import Estimate
from lowtide.planning.region_costs import Cost, RegionCosts, StepCosts
from lowtide.planning.remote import RemoteStudio
from lowtide.planning.studio import Facts

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType
    from typing import Self

    from lowtide.planning.accelerators import Accelerator
    from lowtide.planning.job import Job
    from lowtide.planning.models import Target


def cache_directory() -> Path:
    """Where plans are kept. `LOWTIDE_CACHE` moves the whole cache."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lowtide"
    return Path(os.environ.get("LOWTIDE_CACHE") or default) / "plans"


class CachedStudio:
    """A remote studio that is only started for what is not known yet."""

    def __init__(self, target: Target, job: Job, accelerator: Accelerator, *, enabled: bool) -> None:
        self._remote = RemoteStudio(target, job, accelerator)
        self._running = contextlib.ExitStack()
        self._is_running = False
        self._enabled = enabled and target.kind != "factory"  # a function may build something else tomorrow
        content = hashlib.sha256(target.content).hexdigest()
        self._key = [content, target.kind, target.name, job.to_dict(), accelerator.to_dict(), _versions()]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._running.close()

    @property
    def facts(self) -> Facts:
        return Facts(**self._known("facts", {}, lambda studio: dataclasses.asdict(studio.facts)))

    def estimate(self, policy: str, *, exact: bool) -> Estimate:
        asked = {"policy": policy, "exact": exact}
        return Estimate(**self._known("estimate", asked, lambda studio: studio.estimate(**asked).to_dict()))  # type: ignore[arg-type]

    def costs(self, tile: str) -> StepCosts:
        data = self._known("costs", {"tile": tile}, lambda studio: dataclasses.asdict(studio.costs(tile)))
        regions = [
            RegionCosts(**{**region, "treatments": {name: Cost(**cost) for name, cost in region["treatments"].items()}})
            for region in data["regions"]
        ]
        return StepCosts(**{**data, "regions": regions})

    def _known(self, what: str, asked: dict[str, Any], ask: Callable[[RemoteStudio], dict[str, Any]]) -> dict[str, Any]:
        if not self._enabled:
            return ask(self._started())
        text = json.dumps([what, asked, *self._key], sort_keys=True, default=str)
        path = cache_directory() / f"{hashlib.sha256(text.encode()).hexdigest()}.json"
        if path.is_file():
            data: dict[str, Any] = json.loads(path.read_text())
            return data
        data = ask(self._started())
        _write(path, json.dumps(data))
        return data

    def _started(self) -> RemoteStudio:
        if not self._is_running:
            self._running.enter_context(self._remote)
            self._is_running = True
        return self._remote


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
