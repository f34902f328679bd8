"""Runs simulations of one model and job, and keeps what can be used again: recordings of short stacks.

This is what works in the planning process; the user's process only sees the results.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import torch

from lowtide.errors import NoRegionError
from lowtide.losses.head_loss import count_classes
from lowtide.policy import Policy
from lowtide.policy.rules import joined
from lowtide.regions import find_head, find_mlps, find_regions
from lowtide.simulation.estimate import Estimate, exact_estimate, extrapolated_estimate
from lowtide.simulation.extrapolation import Extrapolation, find_stack, shorten
from lowtide.simulation.region_costs import REGION_POLICIES, region_costs
from lowtide.simulation.step import simulate
from lowtide.targets.batches import make_batch, put_on
from lowtide.targets.job import DTYPES
from lowtide.targets.models import build, build_with_batch

if TYPE_CHECKING:
    from torch import nn

    from lowtide.hardware.accelerators import Accelerator
    from lowtide.simulation.region_costs import StepCosts
    from lowtide.simulation.step import Recording
    from lowtide.targets.job import Job
    from lowtide.targets.target import Target


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSummary:
    """What is known of a model before anything is simulated."""

    name: str
    model_class: str
    parameters: int
    trained: int
    dtype: str
    """What most of the weights are in."""
    regions: list[str]
    longest: int | None
    """The longest sequence that the model was made for, if its configuration says so."""
    tile_options: list[str]
    """What of it can run in tiles, as words of a policy; the first is none."""

    def too_long(self, tokens: int | None) -> str | None:
        """What is to be said of sequences that the model was not made for; it need not be a mistake."""
        if self.longest is None or (tokens or 0) <= self.longest:
            return None
        return f"{tokens} tokens are more than the {self.longest} positions that the model's configuration names"


class Simulator:
    """One model, one job, one accelerator."""

    def __init__(self, target: Target, job: Job, accelerator: Accelerator) -> None:
        self._target = target
        self._job = job
        self._accelerator = accelerator
        model, self._batch = build_with_batch(target, job)
        self._stack = find_stack(model)
        self._names = [region.name for region in find_regions(model)]
        config: Any = getattr(model, "config", None)
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        self.summary = ModelSummary(
            name=target.name,
            model_class=_class_name(model),
            parameters=sum(p.numel() for p in model.parameters()),
            trained=sum(p.numel() for p in model.parameters() if p.requires_grad),
            dtype=_dtype_of(model),
            regions=self._names,
            longest=getattr(text, "max_position_embeddings", None),
            tile_options=tile_options_of(model),
        )
        self._recorded = functools.cache(self._record)

    def estimate(self, policy: str, *, exact: bool) -> Estimate:
        """A policy's figures; of the whole model at once if `exact`, or if it is too short to be cut."""
        if exact or self._stack is None or ";" in policy:
            return exact_estimate(policy, self._record(policy, None))
        return extrapolated_estimate(policy, self._whole(policy))

    def costs(self, tile: str) -> StepCosts:
        """What the solver needs to know, with this tiling."""
        policies = {treatment: joined(treatment, tile) for treatment in REGION_POLICIES}
        if self._stack is None:
            recordings = {treatment: self._recorded(policy, None) for treatment, policy in policies.items()}
            keep = recordings["none"]
            return region_costs(Extrapolation.exact(self._names, keep), recordings)
        recordings = {treatment: self._recorded(policy, self._stack.longer) for treatment, policy in policies.items()}
        return region_costs(self._whole(policies["none"]), recordings)

    def _whole(self, policy: str) -> Extrapolation:
        stack = self._stack
        assert stack is not None  # noqa: S101  (asked before)
        return Extrapolation(
            self._names, stack, self._recorded(policy, stack.short), self._recorded(policy, stack.longer)
        )

    def _record(self, policy: str, count: int | None) -> Recording:
        model = build(self._target, self._job)
        if count is not None and self._stack is not None:
            shorten(model, self._stack, count)
        return simulate(model, self._make_batch, self._job, Policy.parse(policy), self._accelerator)

    def _make_batch(self, model: nn.Module, device: torch.device) -> Any:
        return make_batch(model, self._job, device) if self._batch is None else put_on(device, self._batch)


def tile_options_of(model: nn.Module) -> list[str]:
    """List what of a model can run in tiles: its loss if it has a head as transformers' models do, and its MLPs."""
    try:
        has_loss = count_classes(find_head(model).module) > 0
    except NoRegionError:
        has_loss = False
    if not find_mlps(find_regions(model)):
        return ["", "tile(loss)"] if has_loss else [""]
    return ["", "tile(loss)", "tile"] if has_loss else ["", "tile(mlp)"]


def _dtype_of(model: nn.Module) -> str:
    weights: collections.Counter[torch.dtype] = collections.Counter()
    for parameter in model.parameters():
        weights[parameter.dtype] += parameter.numel()
    most = max(weights, key=lambda dtype: weights[dtype], default=torch.get_default_dtype())
    return next((name for name, dtype in DTYPES.items() if dtype is most), str(most).removeprefix("torch."))


def _class_name(model: object) -> str:
    base = getattr(model, "get_base_model", None)
    return type(base() if base is not None else model).__name__
