"""Counts what an operation costs: FLOPs and bytes moved, and from these seconds on an accelerator's roofline.

FLOPs come from torch's own `flop_registry`. Every other kernel is bound by memory: it reads its inputs and writes its
results once; what it overwrites is not read. Causal attention does half of the square; of a tile of queries at the end
of its keys, it does all but half of the tile's own square.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils.flop_counter import flop_registry

from lowtide._torch import operator_of, schema_of
from lowtide.simulation.meta_tensors import is_meta

if TYPE_CHECKING:
    from collections.abc import Callable

    from lowtide.hardware.accelerators import Rates

aten = torch.ops.aten


class Cost(NamedTuple):
    """What one operation does: FLOPs, bytes, and in which kind of kernel or over which link."""

    flops: float = 0.0
    nbytes: int = 0
    kind: str = "memory"
    """`matmul`, `attention`, `attention_backward` or `memory`."""
    direction: str | None = None
    """For a copy over the link: `to_host` or `to_device`."""
    blocking: bool = False
    """Whether the host waits for the copy."""
    single_precision: bool = False

    def seconds(self, rates: Rates) -> float:
        """Return how long a kernel takes: as long as its FLOPs or its bytes, whichever takes longer."""
        efficiency = 1.0 if self.kind == "memory" else getattr(rates, self.kind)
        peak = rates.single_flops if self.single_precision else rates.flops
        return max(self.flops / (peak * efficiency), self.nbytes / (rates.bandwidth * rates.memory))


_FREE = frozenset(
    {
        aten.view,
        aten._unsafe_view,
        aten.t,
        aten.transpose,
        aten.expand,
        aten.slice,
        aten.select,
        aten.unsqueeze,
        aten.squeeze,
        aten.as_strided,
        aten.detach,
        aten.permute,
        aten.alias,
        aten.split,
        aten.split_with_sizes,
        aten.unbind,
        aten.lift_fresh,
        aten.empty,
        aten.empty_like,
        aten.empty_strided,
        aten.new_empty,
        aten.new_empty_strided,
        aten.chunk,
        aten.narrow,
        aten.set_,
        aten._local_scalar_dense,
    }
)

_COPIES = frozenset({aten._to_copy, aten.copy_})

_OVERWRITES = frozenset({aten.copy_, aten.fill_, aten.zero_})
"""Operations whose first argument is only written."""


def cost_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, tensors: list[torch.Tensor]) -> Cost:
    """Return the cost of an operation whose tensors are all in `tensors`. Views and work on the host cost nothing."""
    kind, count = _classify(func)
    if kind == "free":
        return Cost()
    here = [tensor for tensor in tensors if is_meta(tensor)]
    if not here:
        return Cost()
    if kind == "copy":
        if len(here) < len(tensors):
            return _transfer_cost(operator_of(func), args, kwargs, out)
        kind = "memory"
    nbytes = sum(_touched(tensor) for tensor in here)
    if out is None and isinstance(args[0], list):  # an operation on lists in place returns nothing, and writes all
        nbytes += sum(_touched(tensor) for tensor in args[0])
    if operator_of(func) in _OVERWRITES and is_meta(args[0]):
        nbytes -= _touched(args[0])
    if kind.startswith("attention"):
        args = tuple(_with_heads_of(args[0], argument) for argument in args)
    flops = _count_flops(count, args, kwargs, out) if count else 0.0
    if kind.startswith("attention") and _is_causal(func, args, kwargs):
        flops *= _causal_share(*args[1:3]) if kind == "attention_backward" else _causal_share(*args[:2])
    return Cost(flops, nbytes, kind, single_precision=_is_single(here))


def _is_single(tensors: list[torch.Tensor]) -> bool:
    """Tell whether factors are in float32. The total that 16-bit products are added to may be wider than they are."""
    return all(tensor.dtype is torch.float32 for tensor in tensors if tensor.is_floating_point())


@functools.cache
def _classify(func: Any) -> tuple[str, Callable[..., Any] | None]:
    """Return `free`, `copy` or a cost's kind, and the function that counts FLOPs: the same for every call."""
    packet = operator_of(func)
    if packet in _FREE:
        return "free", None
    if packet in _COPIES:
        return "copy", None
    count = flop_registry.get(packet)
    if count is None:
        return "memory", None
    name = packet.__name__
    if "attention" not in name:
        return "matmul", count
    return ("attention_backward" if "backward" in name else "attention"), count


def _count_flops(count: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> float:
    """Ask torch's registry with shapes. Its own wrapper finds them by a pytree, which takes longer than the rest."""
    formula = getattr(count, "__wrapped__", None)
    if formula is None:  # registered for the tensors themselves
        return float(count(*args, **kwargs, out_val=out))
    named = {name: _shapes_in(argument) for name, argument in kwargs.items()}
    return float(formula(*map(_shapes_in, args), **named, out_shape=_shapes_in(out)))


def _shapes_in(thing: Any) -> Any:
    if isinstance(thing, torch.Tensor):
        return thing.shape
    return type(thing)(map(_shapes_in, thing)) if type(thing) in (list, tuple) else thing


def _transfer_cost(packet: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Cost:
    target = args[0] if packet is aten.copy_ else out
    waits = not (kwargs.get("non_blocking") or (packet is aten.copy_ and len(args) > 2 and args[2]))  # noqa: PLR2004
    direction = "to_device" if is_meta(target) else "to_host"
    return Cost(nbytes=target.nbytes, direction=direction, blocking=waits)


def _touched(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor that are read: an expanded tensor's storage is read, however large it looks."""
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())


def _with_heads_of(query: torch.Tensor, argument: Any) -> Any:
    """Return keys and values as wide as the query's heads: torch's registry refuses fewer heads before 2.12."""
    if not (isinstance(argument, torch.Tensor) and is_meta(argument) and argument.dim() == query.dim() == 4):  # noqa: PLR2004
        return argument
    batch, heads, *rest = argument.shape
    return argument if heads == query.shape[1] else argument.new_empty(batch, query.shape[1], *rest)


def _causal_share(query: torch.Tensor, key: torch.Tensor) -> float:
    """Return the share of all scores that causal attention computes, aligned so that the last query sees all keys."""
    queries, keys = query.shape[-2], key.shape[-2]
    return 1 - queries / (2 * keys) if queries <= keys else keys / (2 * queries)


def _is_causal(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    names = [argument.name for argument in schema_of(func).arguments]
    if "is_causal" not in names:
        return False
    place = names.index("is_causal")
    return bool(args[place] if place < len(args) else kwargs.get("is_causal", False))
