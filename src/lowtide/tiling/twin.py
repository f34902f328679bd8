"""Makes a twin of a module for a trial: it computes the same from the same parameters, and leaves no trace.

The twin has its own buffers, its own copies of tensors and containers in plain attributes, and those hooks that a trial
asks for. A hook's own state is copied, too, as far as it is in its closure, its object or the arguments bound to it.
What refers to a part of the module refers to that part's twin: a forward that somebody replaced, a bound method.
"""

from __future__ import annotations

import collections
import copy
import functools
import types
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lowtide._torch import COMPILED_CALL, CONTENT, buffers_of, children_of, hooks_of, parameters_of, uncompiled
from lowtide.tiling.repacking import keep_packing
from lowtide.tiling.tiled_function import TiledFunction

if TYPE_CHECKING:
    from lowtide.tiling.hooks import Hook

_DEPTH = 3
"""How far a hook's state is copied: from its closure to an object to that object's lists."""


def twin_of(tiled: TiledFunction, hooks: list[Hook]) -> TiledFunction:
    """Return the function on a twin of its module, with these hooks of its parts."""
    if tiled.module is None:
        return tiled
    twins = {module: object.__new__(module.__class__) for module in tiled.module.modules()}  # FSDP2 has a `__new__`
    copier = _Copier(twins)
    keys = {(id(hook.held_by), hook.key) for hook in hooks}
    for module, twin in twins.items():
        object.__setattr__(twin, "__dict__", _attributes(module, copier, keys))
    twin = twins[tiled.module]
    keep_packing(twin)
    return TiledFunction(twin if tiled.function is tiled.module else copier.forward(tiled.function, twin), twin)


def evaluate(twin: nn.Module) -> None:
    """Put a twin into evaluation: nothing random is drawn then."""
    twin.eval()
    keep_packing(twin)


def _attributes(module: nn.Module, copier: _Copier, keys: set[tuple[int, int]]) -> dict[str, Any]:
    """Return the attributes of a module's twin."""
    own = {
        name: value
        for name, value in vars(module).items()
        if name not in (*CONTENT, COMPILED_CALL, "compile", "forward")
    }
    attributes = {
        name: type(value)() if name.endswith("_hooks") and isinstance(value, dict) else copier.attribute(value)
        for name, value in own.items()
    }
    for kind, hooks in hooks_of(module).items():
        kept = {key: hook for key, hook in hooks.items() if (id(hooks), key) in keys}
        attributes[kind].update({key: copier.copy(hook, _DEPTH) for key, hook in kept.items()})
    if "forward" in vars(module):
        attributes["forward"] = copier.forward(vars(module)["forward"], copier.twins[module])
    content = (
        dict(parameters_of(module)),
        {name: None if buffer is None else copier.tensor(buffer) for name, buffer in buffers_of(module).items()},
        {name: None if child is None else copier.twins[child] for name, child in children_of(module).items()},
    )
    return attributes | dict(zip(CONTENT, content, strict=True))


class _Copier:
    """Copies what belongs to one module's parts: each tensor once, and twins in the place of the parts."""

    def __init__(self, twins: dict[nn.Module, nn.Module]) -> None:
        self.twins = twins
        self._tensors: dict[int, torch.Tensor] = {}

    def tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy; the same one for a tensor that is held twice. Parameters are shared."""
        if isinstance(tensor, nn.Parameter):
            return tensor
        if id(tensor) not in self._tensors:
            self._tensors[id(tensor)] = tensor.detach().clone()
        return self._tensors[id(tensor)]

    def forward(self, function: Any, twin: nn.Module) -> Any:
        """Return a part's forward as its twin's. Policies, which are seams in its place, are left out."""
        while hasattr(function, "is_activation_policy"):
            function = function.replaced
        return type(twin).forward.__get__(twin) if function is None else self.copy(uncompiled(function), _DEPTH)

    def attribute(self, value: Any) -> Any:
        """Return a plain attribute for a twin. Objects are shared: nobody knows what they are."""
        if isinstance(value, types.FunctionType) or not _is_copied(value):
            return value
        return self.copy(value, 2)

    def copy(self, value: Any, depth: int) -> Any:
        """Return a copy of a value that may be changed without a trace, as far as this many levels go."""
        if isinstance(value, nn.Module | torch.Tensor):
            return self.twins.get(value, value) if isinstance(value, nn.Module) else self.tensor(value)
        if depth == 0 or not (_is_copied(value) or _is_plain_object(value)):
            return value
        if isinstance(value, types.FunctionType):
            return self._closure(value, depth)
        if isinstance(value, types.MethodType):
            return types.MethodType(value.__func__, self.copy(value.__self__, depth))
        if isinstance(value, functools.partial):
            function, args, kwargs = (self.copy(part, depth) for part in (value.func, value.args, value.keywords))
            return functools.partial(function, *args, **kwargs)
        return self._container(value, depth - 1)

    def _container(self, value: Any, depth: int) -> Any:
        if type(value) is tuple:
            return tuple(self.copy(item, depth) for item in value)
        twin = copy.copy(value)
        if isinstance(value, list | collections.deque):
            for index, item in enumerate(value):
                twin[index] = self.copy(item, depth)
        elif isinstance(value, dict):
            dict.update(twin, {key: self.copy(item, depth) for key, item in value.items()})
        elif not isinstance(value, set):
            vars(twin).update({name: self.copy(item, depth) for name, item in vars(value).items()})
        return twin

    def _closure(self, function: types.FunctionType, depth: int) -> types.FunctionType:
        """Return a function with cells of its own. Globals stay what they are."""
        cells = [self._cell(cell, depth) for cell in function.__closure__ or ()]
        defaults = self.copy(function.__defaults__, depth)
        twin = types.FunctionType(function.__code__, function.__globals__, function.__name__, defaults, tuple(cells))
        twin.__kwdefaults__ = self.copy(function.__kwdefaults__, depth)
        vars(twin).update(vars(function))
        return twin

    def _cell(self, cell: types.CellType, depth: int) -> types.CellType:
        try:
            return types.CellType(self.copy(cell.cell_contents, depth - 1))
        except ValueError:  # empty as yet
            return cell


_CONTAINERS = (tuple, list, dict, set, collections.deque)
_DICTS = (collections.OrderedDict, collections.defaultdict, collections.Counter)


def _is_copied(value: Any) -> bool:
    kinds = (torch.Tensor, nn.Module, types.FunctionType, types.MethodType, functools.partial)
    return isinstance(value, kinds) or type(value) in _CONTAINERS + _DICTS


def _is_plain_object(value: Any) -> bool:
    """Return whether a value is an object of a class that says nothing about copying it, and not one of torch's."""
    kind = type(value)
    is_foreign = kind.__module__.partition(".")[0] in ("builtins", "torch") or isinstance(value, type)
    says = {name for cls in kind.__mro__[:-1] for name in vars(cls)} & {"__copy__", "__reduce__", "__reduce_ex__"}
    return not is_foreign and hasattr(value, "__dict__") and not says
