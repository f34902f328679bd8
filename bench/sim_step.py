"""One training step of a transformers model on the emulated device, counted."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import torch

from lowtide import simdevice

if TYPE_CHECKING:
    from bench.models import TinyModel
    from bench.ways import Way

DEVICE = {"memory": "8GiB", "flops": 1e12, "bandwidth": 1e12, "launch": 1e-6}
"""Slow enough for these models that arithmetic, not launches, takes the time."""


class SimStep:
    """A model on the device under one way. Gradients exist before a step, so that a peak is one of activations."""

    def __init__(self, tiny_model: TinyModel, way: Way, **rates: float) -> None:
        simdevice.enable(**DEVICE, **rates)
        model, batch = tiny_model
        self.model = model.to("sim")
        self.batch = {name: value.to("sim") for name, value in batch.items()}
        self._expected = self._plain_gradients()
        self.way = way(self.model)

    def _plain_gradients(self) -> list[torch.Tensor]:
        self._loss().backward()
        gradients = [p.grad.cpu().clone() for p in self.model.parameters()]
        self.model.zero_grad(set_to_none=False)
        return gradients

    def _loss(self) -> torch.Tensor:
        output = self.model(**self.batch)
        loss = getattr(output, "loss", None)
        return output.last_hidden_state.square().mean() if loss is None else loss

    def run(self) -> dict[str, Any]:
        """Two steps: the first warms up what is lazy. The figures are the second's."""
        self.run_once()
        return self.run_once()

    def run_once(self) -> dict[str, Any]:
        self.model.zero_grad(set_to_none=False)
        gc.collect()
        torch.accelerator.synchronize()
        simdevice.reset()
        base = simdevice.stats().live_bytes
        with self.way:
            loss = self._loss()
            gc.collect()
            held = simdevice.stats().live_bytes - base
            loss.backward()
        del loss
        torch.accelerator.synchronize()
        stats = simdevice.stats()
        return {
            "time": stats.time,
            "held": held,
            "peak": stats.peak_bytes - base,
            "pinned": stats.peak_pinned_bytes,
            "moved": stats.d2h_bytes,
            "flops": stats.flops,
            "violations": len(simdevice.violations()),
            "gradients": self._verdict(),
        }

    def _verdict(self) -> str:
        got = [p.grad.cpu() for p in self.model.parameters()]
        pairs = list(zip(got, self._expected, strict=True))
        lost = sum(bool((ours == 0).all()) and bool((plain != 0).any()) for ours, plain in pairs)
        if lost:
            return f"{lost} of {len(pairs)} lost"
        return "equal" if all(torch.equal(ours, plain) for ours, plain in pairs) else "differ"
