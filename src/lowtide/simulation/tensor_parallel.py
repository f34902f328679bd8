"""Models tensor parallelism as transformers does it (`tp_plan="auto"`): a rank holds its part of each weight.

The plan that a model's class and configuration bring names a style for each module or weight. `divide_weights` gives
the modules their local weights, and hooks that exchange what ranks must exchange: where a weight is divided by outputs
(colwise), the gradient of its input is summed; where by inputs (rowwise), its output is. Everything between the two is
as wide as the rank's part by itself. Rank 0 is simulated: where a width does not divide, it has the most.

transformers does this with DTensor. The sums are new tensors there, and so they are here; what experts sum, they sum in
place. Each layer that shares an input sums that input's gradient by itself: three sums in attention, two in an MLP.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lowtide._torch import parameters_of
from lowtide.errors import InvalidValueError, NoRegionError, PlanError
from lowtide.regions import find_head

if TYPE_CHECKING:
    from lowtide.policy import Policy
    from lowtide.simulation.collectives import Group

_COLWISE = ("colwise", "colwise_rep", "colwise_gather_output", "packed_colwise")
_GATHERS = ("colwise_rep", "colwise_gather_output")
_KNOWN = (
    *_COLWISE,
    "rowwise",
    "embedding_rowwise",
    "moe_tp_experts",
    "replicated_with_grad_allreduce",
    "replicate",
)

_HEADS = ("q_proj", "k_proj", "v_proj", "qkv_proj", "query_key_value")
"""Names of projections whose outputs are heads."""


def plan_of(model: nn.Module) -> dict[str, str]:
    """Return a model's plan, as transformers builds it of its class and its configuration; empty without one."""
    return dict(getattr(model, "tp_plan", None) or {})


def require_divisible(model: nn.Module, ranks: int) -> None:
    """Refuse a model whose weights cannot be divided among this many ranks as its own plan says."""
    plan, name = plan_of(model), type(model).__name__
    if not plan:
        raise PlanError(
            f"tp={ranks}: {name} has no plan that says how its weights are divided (transformers' base_model_tp_plan): "
            "plan it without tp, or with engine='fsdp2'"
        )
    if unknown := sorted(set(plan.values()) - set(_KNOWN)):
        raise PlanError(f"tp={ranks}: the plan of {name} divides weights in a way that is not modelled: {unknown}")
    _require_heads(model, plan, ranks)


def _require_heads(model: nn.Module, plan: dict[str, str], ranks: int) -> None:
    config: Any = model.config
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    divided = {key.rpartition(".")[2] for key, style in plan.items() if style == "colwise"}
    if divided.isdisjoint(_HEADS):
        return
    for field in ("num_attention_heads", "num_key_value_heads"):
        count = getattr(text, field, None)
        if isinstance(count, int) and count % ranks:
            raise PlanError(
                f"tp={ranks}: {type(model).__name__} has {count} {field[4:].replace('_', ' ')}, which cannot be "
                f"divided among {ranks} ranks: plan it with a tp that divides {count}"
            )


def divides_head(model: nn.Module) -> bool:
    """Return whether a model's head is divided: `tile(loss)` needs all of its weights for each tile."""
    try:
        name = find_head(model).name
    except NoRegionError:
        return False
    return plan_of(model).get(_pattern(name), "replicate") != "replicate"


def require_whole_head(model: nn.Module, policy: Policy) -> None:
    """Refuse a policy that tiles the loss of a model whose head is divided, as applying it to such a model does."""
    if "loss" in policy.tile and divides_head(model):
        raise InvalidValueError(
            f"tile(loss) with tp: the plan of {type(model).__name__} divides its head {find_head(model).name!r} among "
            "the ranks, and a rank's loss would need the others' logits. Leave tile(loss) out of the policy"
        )


def divide_weights(model: nn.Module, group: Group) -> list[Any]:
    """Leave a model this rank's part of its weights, and let it exchange the rest. Returns the hooks' handles."""
    plan = plan_of(model)
    local: dict[int, nn.Parameter] = {}
    handles: list[Any] = []
    for name, module in model.named_modules():
        style = plan.get(_pattern(name), "")
        held_by = parameters_of(module)
        for key, weight in held_by.items():
            if weight is None:
                continue
            weight_style = plan.get(_pattern(f"{name}.{key}"), style)
            part = local.setdefault(id(weight), _part(weight, key, weight_style, group.ranks))
            held_by[key] = part
            local[id(part)] = part  # a tied weight is divided once
        handles += _exchange_around(module, style, group)
    return handles


def _pattern(name: str) -> str:
    """Return a module's name as plans write it, with stars for the numbers of layers."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _part(weight: nn.Parameter, key: str, style: str, ranks: int) -> nn.Parameter:
    dim = _divided_dim(weight, key, style)
    if dim is None:
        return weight
    part = weight.detach().chunk(ranks, dim)[0].clone(memory_format=torch.contiguous_format)
    return nn.Parameter(part, requires_grad=weight.requires_grad)


def _divided_dim(weight: nn.Parameter, key: str, style: str) -> int | None:
    """Return the dimension along which a weight is divided: outputs, inputs or none. Experts have one more before."""
    if style in _COLWISE:
        return max(weight.dim() - 2, 0)
    if style == "embedding_rowwise":
        return 0
    return weight.dim() - 1 if style == "rowwise" and key != "bias" else None


def _exchange_around(module: nn.Module, style: str, group: Group) -> list[Any]:
    if style in _COLWISE:
        handles = [module.register_forward_pre_hook(lambda _, args: (group.copy_to_ranks(args[0]), *args[1:]))]
        if style in _GATHERS:
            handles.append(module.register_forward_hook(lambda _, __, out: group.gather_last(out)))
        return handles
    if style == "rowwise":
        return [module.register_forward_hook(lambda _, __, out: group.sum_over_ranks(out))]
    if style == "embedding_rowwise":
        return [
            module.register_forward_pre_hook(lambda layer, args: (_rows_here(layer, args[0]),)),
            module.register_forward_hook(lambda _, __, out: group.sum_over_ranks(out)),
        ]
    if style == "moe_tp_experts":
        return [
            module.register_forward_pre_hook(lambda _, args: _to_experts(args, group)),
            module.register_forward_hook(lambda _, __, out: group.sum_over_ranks(out, in_place=True)),
        ]
    if style == "replicated_with_grad_allreduce":
        return [
            weight.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                lambda done: group.send(done.grad.nbytes, "all_reduce")
            )
            for weight in module.parameters()
            if weight.requires_grad
        ]
    return []


def _to_experts(args: tuple[Any, ...], group: Group) -> tuple[Any, ...]:
    """Sum the gradients of the hidden states and of the router's weights, which each rank's experts have a part of."""
    hidden, *rest = args
    shared = [
        group.copy_to_ranks(thing, in_place=True)
        if isinstance(thing, torch.Tensor) and thing.is_floating_point()
        else thing
        for thing in rest
    ]
    return group.copy_to_ranks(hidden, in_place=True), *shared


def _rows_here(layer: Any, ids: torch.Tensor) -> torch.Tensor:
    """Return the rows of this rank's part of an embedding, which stand for those that it does not have, too."""
    return ids.remainder(layer.weight.shape[0])
