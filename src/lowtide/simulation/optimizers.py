"""Models optimizers: their states, and the work and the copies of their step.

A step in backward takes one weight at a time, with an optimizer for each, as a hook on a weight's gradient does:
`register_post_accumulate_grad_hook`, with `step` and `zero_grad` in it. `FusedAdamW` models the fused and the 8-bit
AdamW, for which torch has no meta kernels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from lowtide.simulation.ledger import Ledger
    from lowtide.targets.job import Job


class Optimizers:
    """The job's optimizer over a rank's weights: a single one, or one for each weight whose step is in backward."""

    def __init__(self, parameters: list[torch.nn.Parameter], job: Job, ledger: Ledger) -> None:
        self._ledger = ledger
        groups = [[parameter] for parameter in parameters] if job.optimizer_in_backward else [parameters]
        self._all = [_new_optimizer(group, job.optimizer) for group in groups]
        self._of = {id(group[0]): optimizer for group, optimizer in zip(groups, self._all, strict=True) if group}
        if job.optimizer == "adamw_foreach":
            self._make_states(groups)

    def _make_states(self, groups: list[list[torch.nn.Parameter]]) -> None:
        """Take a step, in which torch's optimizers make their states."""
        for group, optimizer in zip(groups, self._all, strict=True):
            for parameter in group:
                parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
            optimizer.zero_grad()

    def step_after_backward(self) -> None:
        """Update every weight that has a gradient, and free the gradients."""
        for optimizer in self._all:
            optimizer.step()
            optimizer.zero_grad()

    def step_in_backward(self, parameters: list[torch.nn.Parameter]) -> None:
        """Update these weights one by one, each with its own optimizer, and free each gradient."""
        self._ledger.in_optimizer = True
        for parameter in parameters:
            optimizer = self._of[id(parameter)]
            optimizer.step()
            optimizer.zero_grad()
        self._ledger.in_optimizer = False


def _new_optimizer(parameters: list[torch.nn.Parameter], name: str) -> torch.optim.Optimizer:
    if name == "adamw_foreach":
        return torch.optim.AdamW(parameters, lr=1e-4, foreach=True)
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=1e-4, foreach=False)
    return FusedAdamW(parameters, torch.uint8 if name == "adamw8bit" else None)


class FusedAdamW(torch.optim.Optimizer):
    """AdamW as one kernel over all weights, with two states per weight: in eight bits, or as wide as the weight."""

    def __init__(self, parameters: list[torch.nn.Parameter], state_dtype: torch.dtype | None = None) -> None:
        super().__init__(parameters, {})
        for parameter in parameters:
            dtype = state_dtype or parameter.dtype
            self.state[parameter] = {
                name: torch.empty(parameter.shape, dtype=dtype, device=parameter.device)
                for name in ("exp_avg", "exp_avg_sq")
            }

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ARG002
        """Read every weight, gradient and state, and write all but the gradients, as the fused kernel does."""
        updated: list[Any] = [parameter for parameter in self.state if parameter.grad is not None]
        if not updated:
            return
        with torch.no_grad():
            torch._foreach_add_(updated, [parameter.grad for parameter in updated])
            torch._foreach_mul_([tensor for parameter in updated for tensor in self.state[parameter].values()], 1)
