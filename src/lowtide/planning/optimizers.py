"""Optimizers of a simulated step that torch has no blank kernels for."""

from __future__ import annotations

from typing import Any

import torch


class FusedAdamW(torch.optim.Optimizer):
    """AdamW as one kernel over all weights: two states per weight, in eight bits or as wide as the weight."""

    def __init__(self, parameters: list[torch.nn.Parameter], state_dtype: torch.dtype | None = None) -> None:
        super().__init__(parameters, {})
        for parameter in parameters:
            dtype = state_dtype or parameter.dtype
            self.state[parameter] = {
                name: torch.empty(parameter.shape, dtype=dtype, device=parameter.device)
                for name in ("exp_avg", "exp_avg_sq")
            }

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ARG002
        """Every weight, gradient and state is read, and all but the gradient are written."""
        with torch.no_grad():
            for parameter, state in self.state.items():
                if parameter.grad is not None:
                    parameter.add_(parameter.grad)
                    for tensor in state.values():
                        tensor.copy_(tensor)
