"""Models optimizers: their states, and the work and the copies of their step.

A step in backward takes one weight at a time, with an optimizer for each, as a hook on a weight's gradient does:
`register_post_accumulate_grad_hook`, with `step` and `zero_grad` in it. What each keeps and makes:

| optimizer | states per weight | in its step |
|---|---|---|
| adamw | two, as wide as the weight | one kernel over all weights |
| adamw_foreach | the same | torch's own code: copies of all weights |
| adamw8bit | two of a byte (bitsandbytes) | one kernel over all weights |
| paged_adamw8bit | the same in memory that the driver pages: not the allocator's | the same |
| adamw_offloaded | two in host memory | gradients to the host, weights back |
| adafactor | a float32 number per row and one per column | float32 copies of a weight and its gradient, one by one |
| muon | one for matrices of blocks, AdamW's two for the rest | Newton and Schulz's five iterations in bfloat16 |
| lion | one | one kernel over all weights |
| sgd | none | one weight at a time |
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from lowtide.simulation.ledger import Ledger
    from lowtide.targets.job import Job


aten = torch.ops.aten


class Optimizers:
    """The job's optimizer over a rank's weights: a single one, or one for each weight whose step is in backward."""

    def __init__(
        self, parameters: list[torch.nn.Parameter], job: Job, ledger: Ledger, hidden: frozenset[int] = frozenset()
    ) -> None:
        """`hidden` are the identities of the blocks' weights."""
        self._ledger = ledger
        groups = [[parameter] for parameter in parameters] if job.optimizer_in_backward else [parameters]
        self._all = [_new_optimizer(group, job.optimizer, hidden) for group in groups]
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


def _new_optimizer(parameters: list[torch.nn.Parameter], name: str, hidden: frozenset[int]) -> torch.optim.Optimizer:
    if name == "muon":
        return Muon(parameters, hidden)
    return _MAKERS[name](parameters)


class FusedAdamW(torch.optim.Optimizer):
    """An optimizer that is one kernel over all weights, with so many states each: in eight bits, or as wide as it."""

    def __init__(
        self, parameters: list[torch.nn.Parameter], state_dtype: torch.dtype | None = None, *, states: int = 2
    ) -> None:
        super().__init__(parameters, {})
        for parameter in parameters:
            dtype = state_dtype or parameter.dtype
            self.state[parameter] = {
                f"state{number}": torch.empty(parameter.shape, dtype=dtype, device=parameter.device)
                for number in range(states)
            }

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ARG002
        """Read every weight, gradient and state, and write all but the gradients, as the fused kernel does."""
        updated: list[Any] = [parameter for parameter in self.state if parameter.grad is not None]
        if not updated:
            return
        with torch.no_grad():
            aten._foreach_add_.List(updated, [parameter.grad for parameter in updated])
            if states := [tensor for parameter in updated for tensor in self.state[parameter].values()]:
                aten._foreach_mul_.Scalar(states, 1)


class OffloadedAdamW(torch.optim.Optimizer):
    """AdamW on the host: gradients go there, and new weights come back."""

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ARG002
        """Copy every gradient to the host, and every weight from it."""
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                if parameter.grad is not None:
                    parameter.copy_(parameter.grad.to("cpu"), non_blocking=True)


class Adafactor(torch.optim.Optimizer):
    """Adafactor without momentum, as transformers has it: factored second moments, in float32."""

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        super().__init__(parameters, {})
        for parameter in parameters:
            shape = parameter.shape
            sizes = [shape] if len(shape) < 2 else [shape[:-1], shape[:-2] + shape[-1:]]  # noqa: PLR2004
            self.state[parameter] = {
                f"sums{place}": torch.empty(size, dtype=torch.float32, device=parameter.device)
                for place, size in enumerate(sizes)
            }

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ARG002
        """Update one weight after the other. Source: `Adafactor.step` in transformers/optimization.py."""
        with torch.no_grad():
            for parameter, sums in self.state.items():
                if parameter.grad is not None:
                    _adafactor_step(parameter, parameter.grad, list(sums.values()))


def _adafactor_step(parameter: torch.Tensor, grad: torch.Tensor, sums: list[torch.Tensor]) -> None:
    grad, weights = grad.float(), parameter.float()
    update = grad.pow(2).add_(1e-30)
    if len(sums) > 1:
        sums[0].lerp_(update.mean(dim=-1), 0.1)
        sums[1].lerp_(update.mean(dim=-2), 0.1)
        update = sums[0].rsqrt().unsqueeze(-1) * sums[1].rsqrt().unsqueeze(-2)
    else:
        sums[0].lerp_(update, 0.1)
        update = sums[0].rsqrt()
    update.mul_(grad)
    weights.sub_(update.mul_(1e-4))
    if weights.dtype is not parameter.dtype:
        parameter.copy_(weights)


_ITERATIONS = 5


class Muon(torch.optim.Optimizer):
    """Muon for the matrices of blocks, AdamW for embeddings, head, norms and biases."""

    def __init__(self, parameters: list[torch.nn.Parameter], hidden: frozenset[int]) -> None:
        super().__init__(parameters, {})
        self._matrices = [p for p in parameters if p.dim() == 2 and id(p) in hidden]  # noqa: PLR2004
        chosen = {id(parameter) for parameter in self._matrices}
        self._rest = (
            FusedAdamW([p for p in parameters if id(p) not in chosen]) if len(chosen) < len(parameters) else None
        )
        for parameter in self._matrices:
            self.state[parameter] = {"momentum": torch.empty_like(parameter)}

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ARG002
        """Orthogonalize each matrix's momentum by five iterations. Source: torch/optim/_muon.py."""
        if self._rest is not None:
            self._rest.step()
        with torch.no_grad():
            for parameter in self._matrices:
                if parameter.grad is not None:
                    momentum = self.state[parameter]["momentum"].lerp_(parameter.grad, 0.05)
                    parameter.add_(_orthogonal(parameter.grad.lerp(momentum, 0.95)).to(parameter.dtype), alpha=-1e-3)


def _orthogonal(update: torch.Tensor) -> torch.Tensor:
    matrix = update.bfloat16()
    matrix = matrix.T if update.shape[0] > update.shape[1] else matrix
    matrix.div_(matrix.norm().clamp(min=1e-7))
    for _ in range(_ITERATIONS):
        gram = matrix @ matrix.T
        matrix = torch.addmm(matrix, torch.addmm(gram, gram, gram, beta=-4.775, alpha=2.0315), matrix, beta=3.4445)
    return matrix.T if update.shape[0] > update.shape[1] else matrix


_MAKERS: dict[str, Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]] = {
    "adamw": FusedAdamW,
    "adamw_foreach": functools.partial(torch.optim.AdamW, lr=1e-4, foreach=True),
    "adamw8bit": functools.partial(FusedAdamW, state_dtype=torch.uint8),
    "paged_adamw8bit": functools.partial(FusedAdamW, states=0),
    "adamw_offloaded": OffloadedAdamW,
    "adafactor": Adafactor,
    "lion": functools.partial(FusedAdamW, states=1),
    "sgd": functools.partial(torch.optim.SGD, lr=1e-4, foreach=False),
}
