"""Simulates one model and job under any policy, and keeps the recordings of truncated stacks for further questions.

A `Simulator` runs in the worker process (`worker`); the user's process has a `SimulatorProcess` and sees the results.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import torch

from lowtide.errors import NoRegionError
from lowtide.losses.head_loss import count_classes
from lowtide.policy import Policy
from lowtide.policy.rules import joined
from lowtide.regions import calls_attention, find_head, find_mlps, find_regions
from lowtide.simulation.chunked_head import require_chunked_head
from lowtide.simulation.context_parallel import require_ring
from lowtide.simulation.estimate import Estimate, exact_estimate, extrapolated_estimate
from lowtide.simulation.extrapolation import Extrapolation, find_stack, truncate
from lowtide.simulation.meta_tensors import MetaKernels
from lowtide.simulation.region_costs import region_costs
from lowtide.simulation.sequence_parallel import require_heads
from lowtide.simulation.step import resident_bytes, simulate
from lowtide.simulation.tensor_parallel import divides_head, require_divisible
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
    """What is known about a model before anything is simulated."""

    name: str
    model_class: str
    parameters: int
    trained: int
    dtype: str
    """The type of most of the weights."""
    regions: list[str]
    longest: int | None
    """The longest sequence that the model was made for, if its configuration names one."""
    tile_options: list[str]
    """What can run in tiles, as words of a policy; the first, `""`, tiles nothing."""
    unquantized_bytes: int = 0
    """Of a 4-bit base, the bytes of experts' weights in three dimensions, which stay as they are."""
    resident_bytes: int = 0
    """Bytes that one rank's device holds before a step begins: weights and the optimizer's states."""

    def too_long(self, tokens: int | None) -> str | None:
        """Return a note about sequences that are longer than the model was made for, which need not be a mistake."""
        if self.longest is None or (tokens or 0) <= self.longest:
            return None
        return f"{tokens} tokens are more than the {self.longest} positions that the model's configuration names"


class Simulator:
    """Answers questions about one model, one job and one accelerator by simulating training steps."""

    def __init__(self, target: Target, job: Job, accelerator: Accelerator) -> None:
        self._target = target
        self._job = job
        self._accelerator = accelerator
        model, self._batch = build_with_batch(target, job)
        if job.tp > 1:
            require_divisible(model, job.tp)
        if job.sp > 1:
            require_heads(model, job.sp)
        if job.cp > 1:
            require_ring(model, job.cp, job.tokens)
        if job.trainer == "trl":
            require_chunked_head(model)
        self._stack = find_stack(model)
        self._names = [region.name for region in find_regions(model)]
        config: Any = getattr(model, "config", None)
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        self.summary = ModelSummary(
            name=target.name,
            model_class=_class_name(model),
            parameters=sum(p.numel() for p in model.parameters()),
            trained=sum(p.numel() for p in model.parameters() if p.requires_grad),
            dtype=_most_common_dtype(model),
            regions=self._names,
            longest=getattr(text, "max_position_embeddings", None),
            tile_options=find_tile_options(model, tp=job.tp, parts=job.parts, trainer=job.trainer),
            unquantized_bytes=_unquantized_bytes(model) if job.base == "4bit" else 0,
            resident_bytes=resident_bytes(model, job, accelerator),
        )
        self._kernels = MetaKernels()
        self._truncated: dict[int, nn.Module] = {}
        self._recorded = functools.cache(self._record)

    def estimate(self, policy: str, *, exact: bool) -> Estimate:
        """Return a policy's figures.

        Every layer is simulated if `exact`, if the stack is too short to be truncated, or if the policy has rules for
        single regions; otherwise the figures are extrapolated.
        """
        if exact or self._stack is None or ";" in policy:
            return exact_estimate(policy, self._record(policy, None))
        return extrapolated_estimate(policy, self._extrapolation(policy))

    def costs(self, tile: str, policies: tuple[str, ...]) -> StepCosts:
        """Return what the solver needs to know: each region's costs under these policies, with this tile option."""
        length = None if self._stack is None else self._stack.long
        recordings = {policy: self._recorded(joined(policy, tile), length) for policy in policies}
        base = policies[0]
        if self._stack is None:
            return region_costs(Extrapolation.exact(self._names, recordings[base]), recordings, base)
        return region_costs(self._extrapolation(joined(base, tile)), recordings, base)

    def _extrapolation(self, policy: str) -> Extrapolation:
        stack = self._stack
        assert stack is not None  # noqa: S101  (asked before)
        return Extrapolation(
            self._names, stack, self._recorded(policy, stack.short), self._recorded(policy, stack.long)
        )

    def _record(self, policy: str, length: int | None) -> Recording:
        """Simulate one step, with the stack truncated to `length` layers; None keeps them all."""
        return simulate(
            self._build(length), self._make_batch, self._job, Policy.parse(policy), self._accelerator, self._kernels
        )

    def _build(self, length: int | None) -> nn.Module:
        """Build the model anew for each step; a copy of a truncated one is made much faster than the whole model.

        A module or a factory of the user's is not copied: what it is made of is unknown.
        """
        if length is None or self._stack is None:
            return build(self._target, self._job)
        if length in self._truncated:
            return copy.deepcopy(self._truncated[length])
        model = build(self._target, self._job)
        truncate(model, self._stack, length)
        if self._target.kind not in ("module", "factory"):
            self._truncated[length] = copy.deepcopy(model)
        return model

    def _make_batch(self, model: nn.Module, device: torch.device) -> Any:
        return make_batch(model, self._job, device) if self._batch is None else put_on(device, self._batch)


def find_tile_options(model: nn.Module, tp: int = 1, parts: int = 1, trainer: str | None = None) -> list[str]:
    """List what can run in tiles, from the least to the most: the loss, then the MLPs, then whole blocks.

    The loss must be that of a model with a head as transformers' models have it. A block runs in tiles if its call of
    attention can be seen; the last option leaves those alone in which it cannot, and tiles their MLPs. A head that `tp`
    divides cannot run in tiles, nor one that a trainer never calls, nor attention over a sequence that is spread over
    ranks in `parts`.
    """
    try:
        has_loss = count_classes(find_head(model).module) > 0 and trainer is None
        has_loss = has_loss and not (tp > 1 and divides_head(model))
    except NoRegionError:
        has_loss = False
    regions = find_regions(model)
    words = ["loss"] if has_loss else []
    options = ["", *(["tile(loss)"] if has_loss else [])]
    if find_mlps(regions):
        words.insert(0, "mlp")
        options.append(f"tile({', '.join(words)})")
    if parts == 1 and any(calls_attention(region.module) for region in regions):
        options.append(str(Policy(tile=("attention", *words))))
    return options


def _unquantized_bytes(model: nn.Module) -> int:
    """Return the bytes of stacked experts: bitsandbytes replaces linear layers, and these are plain parameters."""
    return sum(p.nbytes for p in model.parameters() if p.dim() == 3 and not p.requires_grad)  # noqa: PLR2004


def _most_common_dtype(model: nn.Module) -> str:
    weights: collections.Counter[torch.dtype] = collections.Counter()
    for parameter in model.parameters():
        weights[parameter.dtype] += parameter.numel()
    most = max(weights, key=lambda dtype: weights[dtype], default=torch.get_default_dtype())
    return next((name for name, dtype in DTYPES.items() if dtype is most), str(most).removeprefix("torch."))


def _class_name(model: object) -> str:
    base = getattr(model, "get_base_model", None)
    return type(base() if base is not None else model).__name__
