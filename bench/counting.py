"""Counts of one training step on any device."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry


class Operators(TorchDispatchMode):
    """Operators, matrix products among them, and their FLOPs: torch's own formulas, without its look at modules, which
    trips over what peers do. And how often fused attention was computed."""

    def __init__(self) -> None:
        super().__init__()
        self.all = self.products = self.flops = self.attention = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        del types
        output = func(*args, **(kwargs or {}))
        self.all += 1
        self.attention += "attention" in str(func) and "backward" not in str(func)
        if func._overloadpacket in flop_registry:
            self.products += 1
            self.flops += flop_registry[func._overloadpacket](*args, **(kwargs or {}), out_val=output)
        return output
