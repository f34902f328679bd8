"""The yardstick of all distributed tests: one process on the joined batch."""

from __future__ import annotations

import torch


def to_numpy(model) -> dict:
    """The gradients by name, whole, in a form that crosses process borders."""
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {
        name: (grad.full_tensor() if hasattr(grad, "full_tensor") else grad).cpu().numpy()
        for name, grad in found.items()
    }


def assert_joined(per_rank, reference, *, tolerance=1e-5, leave_out=()):
    """Every rank has the gradients that `reference`, a model after its backward, has."""
    expected = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
    assert any(grad.abs().max() > 0 for grad in expected.values())
    for grads in per_rank:
        for name, grad in expected.items():
            if not name.startswith(tuple(leave_out)):
                ours = torch.from_numpy(grads[name])
                assert (ours - grad).norm() <= tolerance * grad.norm() + 1e-30, name
