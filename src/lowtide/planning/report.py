"""Writes what a plan says about one run as a form, with room for what a GPU says about the same run."""

from __future__ import annotations

import dataclasses
import json
from importlib import metadata
from typing import TYPE_CHECKING, Any

from lowtide._version import __version__
from lowtide.errors import PlanError
from lowtide.targets.job import Job

if TYPE_CHECKING:
    from lowtide.planning.result import Plan

MEASURED: dict[str, Any] = {
    "allocated_bytes": None,
    "reserved_bytes": None,
    "seconds": None,
    "gpu": None,
    "torch": None,
    "source": None,
}
"""What the user fills in: torch.cuda.max_memory_allocated() and max_memory_reserved() of the third step, and where."""


def report_of(plan: Plan) -> str:
    """Return the report of a plan's shown candidate as JSON, with only those settings that are not defaults."""
    if plan.shown is None:
        raise PlanError(
            "nothing was simulated, because the weights alone are more than the budget: a report is of a plan with "
            "figures. Give a larger budget or device"
        )
    estimate = plan.shown.estimate
    job = dataclasses.asdict(plan.job)
    defaults = {field.name: field.default for field in dataclasses.fields(Job)}
    return json.dumps(
        {
            "lowtide": __version__,
            "transformers": _version("transformers"),
            "model": plan.summary.name,
            "class": plan.summary.model_class,
            "parameters": plan.summary.parameters,
            "device": plan.accelerator.name,
            "policy": plan.shown.policy,
            "settings": {name: value for name, value in job.items() if value != defaults[name]},
            "planned": {
                "allocated_bytes": estimate.peak_bytes,
                "reserved_bytes": estimate.reserved_bytes,
                "seconds": estimate.seconds,
            },
            "measured": MEASURED,
        },
        indent=2,
    )


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
