"""A pytest plugin that puts Lowtide's functions in the place of other packages', for `tools/foreign_tests.py`.

`LOWTIDE_REPLACES` says what is replaced, and the file `LOWTIDE_CALLS` receives how many calls were answered: a suite
that never calls what was replaced proves nothing.
"""

from __future__ import annotations

import importlib.util
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import lowtide

_answered = 0
_patches: list[Any] = []
_libraries: list[torch.library.Library] = []


def pytest_load_initial_conftests() -> None:
    """Replace before anything of the suite is imported."""
    _let_torchvision_import()
    {"checkpoint": _replace_checkpoint, "liger": _replace_liger}[os.environ["LOWTIDE_REPLACES"]]()


def pytest_unconfigure() -> None:
    Path(os.environ["LOWTIDE_CALLS"]).write_text(str(_answered + sum(patch.calls for patch in _patches)))


def _let_torchvision_import() -> None:
    """Define two operators that importing torchvision asks for, which wheels for CUDA lack on other machines."""
    if importlib.util.find_spec("torchvision") is not None and not torch.cuda.is_available():
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _libraries.append(library)


def _replace_checkpoint() -> None:
    _patches.append(lowtide.patch_torch())


def _replace_liger() -> None:
    from liger_kernel import ops

    # their activations, which both sides of the comparison use, are kernels for GPUs
    ops.LigerSiLUMulFunction = _Activation(F.silu)
    ops.LigerGELUMulFunction = _Activation(lambda gate: F.gelu(gate, approximate="tanh"))
    ops.apply_tiled_mlp = _tiled_mlp
    ops.LigerFusedLinearCrossEntropyFunction = _LinearCrossEntropy


class _Activation:
    """Stands for the autograd function of a gated activation."""

    def __init__(self, activation: Any) -> None:
        self._activation = activation

    def apply(self, gate: torch.Tensor, up: torch.Tensor, *_: Any) -> torch.Tensor:
        return self._activation(gate) * up


def _tiled_mlp(fn: Any, mlp_module: torch.nn.Module, x: torch.Tensor, num_shards: int | None, **_: Any) -> torch.Tensor:
    global _answered  # noqa: PLW0603  (one count for the process)
    _answered += 1
    tokens = x.shape[:-1].numel()
    shards = num_shards or math.ceil(x.shape[-2] / x.shape[-1])
    return lowtide.tile(_Bound(fn, mlp_module), x, tokens=math.ceil(tokens / shards))


class _Bound(torch.nn.Module):
    """Their function of a module and an input, as a module."""

    def __init__(self, function: Any, module: torch.nn.Module) -> None:
        super().__init__()
        self._function, self.module = function, module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._function(self.module, x)


class _LinearCrossEntropy:
    """Answers for the autograd function of Liger's fused loss."""

    @staticmethod
    def apply(hidden: Any, weight: Any, labels: Any, *settings: Any) -> tuple[Any, None, None, None]:
        global _answered  # noqa: PLW0603  (one count for the process)
        names = ("bias", "ce_weight", "ignore_index", "lse_square_scale", "label_smoothing", "reduction", "softcap")
        extras = (
            "return_z_loss",
            "accum_dtype",
            "use_token_scaling",
            "return_token_accuracy",
            "return_predicted_tokens",
        )
        given = dict(zip((*names, *extras), settings, strict=False))
        asked = [name for name in ("ce_weight", "lse_square_scale", *extras) if _is_given(given.get(name))]
        if set(asked) - {"accum_dtype"}:  # sums are in single precision anyway
            pytest.skip(f"lowtide.linear_cross_entropy has no {', '.join(asked)}")
        _answered += 1
        loss = lowtide.linear_cross_entropy(
            hidden,
            weight,
            labels,
            bias=given.get("bias"),
            ignore_index=given.get("ignore_index", -100),
            label_smoothing=given.get("label_smoothing", 0.0),
            reduction=given.get("reduction", "mean"),
            logit_softcap=given.get("softcap"),
            tokens=64,
            kernel="torch",
        )
        return loss, None, None, None


def _is_given(value: Any) -> bool:
    return isinstance(value, torch.Tensor) or value not in (None, False, 0)
