"""The second run of a region: its errors arrive as they were raised, and torch is told whose hooks are around it."""

from __future__ import annotations

import sys

import pytest
import torch

import lowtide
from lowtide.stores import DiskStore


class FailsLater:
    """Raises in its second run, before or after something was saved."""

    def __init__(self, error: Exception, *, at_the_end: bool) -> None:
        self._error, self._at_the_end, self._runs = error, at_the_end, 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self._runs += 1
        if self._runs > 1 and not self._at_the_end:
            raise self._error
        y = x.sin().cos()
        if self._runs > 1:
            raise self._error
        return y.tanh()


@pytest.mark.parametrize("at_the_end", [False, True])
@pytest.mark.parametrize("error", [RuntimeError("a shape is wrong"), ValueError("a value is wrong")], ids=repr)
def test_an_error_of_the_recompute_is_the_error_of_backward(error, at_the_end):
    x = torch.randn(4, requires_grad=True)
    y = lowtide.checkpoint(FailsLater(error, at_the_end=at_the_end), x)
    with pytest.raises(type(error), match=str(error)):
        y.sum().backward()
    assert x.grad is None


@pytest.fixture
def told(monkeypatch):
    """What torch's checkpoint is told about hooks around each call."""
    module = sys.modules["lowtide.checkpointing.checkpoint"]  # the package has a function of that name
    seen, original = [], module.run_checkpoint

    def noted(function, tensors, settings, respect_saved_tensors_hooks):
        seen.append(respect_saved_tensors_hooks)
        return original(function, tensors, settings, respect_saved_tensors_hooks)

    monkeypatch.setattr(module, "run_checkpoint", noted)
    return seen


def test_torch_need_not_warn_about_hooks_of_ours(told, tmp_path):
    x = torch.randn(4, requires_grad=True)
    lowtide.checkpoint(torch.sin, x).sum().backward()
    assert told == [None]
    store = DiskStore(tmp_path, tmpfs=True)
    lowtide.checkpoint(torch.sin, x, offload=store).sum().backward()
    with lowtide.offload(store):
        y = lowtide.checkpoint(torch.sin, x)
    y.sum().backward()
    assert told == [None, False, False]
