"""Torch's own context parallelism on a CPU: what it lacks there is the CPU's attention kernel, and nothing else.

Its ring of attention takes any kernel that returns row sums, and its table of kernels has those of GPUs only. Inside
`ring_attention` it has that of the CPU as well.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._context_parallel import _attention as torchs

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
SEQUENCE = 2
"""The dimension of queries, keys and values that counts tokens."""


@contextlib.contextmanager
def ring_attention(*, is_balanced: bool = True, sums_in_float32: bool = False) -> Iterator[None]:
    """Let `context_parallel` run on a CPU inside.

    `is_balanced`: each rank has a part from the front and one from the back, as is torch's default. `sums_in_float32`,
    torch's default, too, would cost a model in double precision its precision.
    """
    options = {"enable_load_balance": is_balanced, "convert_to_f32": sums_in_float32}
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(torchs.custom_ops, {FORWARD: _forward, BACKWARD: _backward}))
        for name, value in options.items():
            stack.enter_context(mock.patch.object(torchs._cp_options, name, value))
        yield


@contextlib.contextmanager
def in_ring(given: dict[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
    """Have this rank's parts of tensors whose second dimension is a sequence; inside, ranks share attention."""
    own = {name: tensor.clone() for name, tensor in given.items()}
    mesh, parts = init_device_mesh("cpu", (dist.get_world_size(),)), [*own.values()]
    with context_parallel(mesh, buffers=parts, buffer_seq_dims=[1] * len(parts), no_restore_buffers={*parts}):
        yield own


def without_masks(model: nn.Module) -> nn.Module:
    """Let a model of transformers attend causally without a mask, as accelerate does: the ring knows no masks."""

    def drop(_module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, {**kwargs, "attention_mask": None, "is_causal": True}

    for name, module in model.named_modules():
        if name.endswith("self_attn"):
            module.register_forward_pre_hook(drop, with_kwargs=True, prepend=True)
    return model


def _forward(_operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[DTensor, ...]:
    named = _named(FORWARD, args, kwargs)
    query, key, value = (named.pop(name) for name in ("query", "key", "value"))
    local = (tensor.to_local() for tensor in (query, key, value))
    found = torchs._templated_ring_attention(query.device_mesh.get_group(), SEQUENCE, FORWARD, *local, **named)
    return _as_whole(found, query)


def _backward(_operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[DTensor, ...]:
    named = _named(BACKWARD, args, kwargs)
    query = named["query"]
    local = {name: value.to_local() if isinstance(value, DTensor) else value for name, value in named.items()}
    group, gradient = query.device_mesh.get_group(), local.pop("grad_out")
    run = torchs._templated_ring_attention_backward
    return _as_whole(run(group, SEQUENCE, BACKWARD, gradient, "grad_out", **local), query)


def _named(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of an operator by name."""
    names = [argument.name for argument in operator._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _as_whole(found: tuple[torch.Tensor, ...], like: DTensor) -> tuple[DTensor, ...]:
    return tuple(DTensor.from_local(part, like.device_mesh, like.placements, run_check=False) for part in found)
