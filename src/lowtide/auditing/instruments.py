"""Instruments that watch one training step from outside, whatever engine runs it.

- `Calls`: pre-forward hooks count each module's calls, separately in forward and in backward. They are pre-hooks,
  because a recompute may stop early and never reach the end of a module.
- `Operators`: a dispatch mode sees every operator, in recomputes too. It remembers each new storage weakly and by the
  block that made it: what is alive after forward is what the graph holds, through hooks, closures, keywords or caches
  alike. It takes a checksum of every random draw, and counts the operators that compute something, attention by itself:
  selective checkpointing keeps some outputs of a block that it runs again.
- `Accumulations`: hooks on the parameters count how often each accumulates a gradient.

None of them keeps anything alive, and none changes a value.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import re
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lowtide._torch import (
    StorageWeakRef,
    TorchDispatchMode,
    current_node,
    is_functorch_wrapped,
    pytree,
    schema_of,
    sequence_number,
)
from lowtide.auditing.comparison import checksum
from lowtide.modules import ancestors, named_modules, named_parameters

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from types import TracebackType
    from typing import Self


@dataclasses.dataclass(frozen=True)
class TrackedStorage:
    """A weak reference to a storage that forward made, with the block that made it."""

    reference: StorageWeakRef
    nbytes: int
    block: str

    @property
    def is_alive(self) -> bool:
        return not self.reference.expired()  # type: ignore[no-untyped-call]

    @property
    def key(self) -> int:
        return int(self.reference.cdata)


class Calls:
    """Counts the calls of every module, and knows which blocks are running."""

    def __init__(self, model: nn.Module, blocks: Iterable[str]) -> None:
        self.in_backward = False
        self.forward: collections.Counter[str] = collections.Counter()
        self.backward: collections.Counter[str] = collections.Counter()
        self.inputs: dict[str, list[TrackedStorage]] = {}
        """The storages that each block was given in forward."""
        self.started_recompute: set[str] = set()
        """Blocks that a recompute began with; the rest ran again as parts of them, or after them."""
        self.most_restored_alive = 0
        """How many recomputes at most had inputs that were still alive as another recompute began."""
        self._restored: dict[int | str, list[TrackedStorage]] = {}
        """By recompute: the inputs of the block that it began with."""
        self._run_again: set[str] = set()
        self._modules = {name: module for name, module in named_modules(model) if takes_hooks(module)}
        self._blocks = set(blocks)
        self._children: dict[str, list[str]] = {}
        self._running: list[str] = []
        self._handles: list[Any] = []

    @property
    def block(self) -> str:
        """The innermost block that is running; the empty string outside of blocks."""
        return self._running[-1] if self._running else ""

    def runs_in_backward(self, name: str) -> int:
        """Return how often a block ran again.

        Engines that replace a block's `forward` run it without its hooks. Then the modules inside it tell: most of
        those that forward called must have been called again, for a few may come after an early stop, and the block
        ran as often as the one that was called the fewest times, for tiles may project keys and values once more.
        """
        if self.backward[name] or not self.forward[name]:
            return self.backward[name]
        parts = list(_innermost_parts(name, self._children, self.forward))
        again = [-(-self.backward[part] * self.forward[name] // self.forward[part]) for part in parts]
        called_again = [count for count in again if count]
        return min(called_again) if 2 * len(called_again) > len(again) else 0

    def __enter__(self) -> Self:
        for name in self._modules:
            self._children.setdefault(name.rpartition(".")[0], []).append(name)
        for name, module in self._modules.items():
            before = functools.partial(self._before, name)
            self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True, prepend=True))
            if name in self._blocks:
                after = functools.partial(self._after, name)
                self._handles.append(module.register_forward_hook(after, always_call=True))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()

    def _before(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        del module
        (self.backward if self.in_backward else self.forward)[name] += 1
        if name in self._blocks:
            self._running.append(name)
        if self.in_backward:
            self._count_restored(name, (args, kwargs))
        elif name in self._blocks:
            self.inputs.setdefault(name, []).extend(_input_storages((args, kwargs), name))

    def _after(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        del module, args, output
        while self._running and self._running.pop() != name:
            pass

    def _count_restored(self, name: str, values: Any) -> None:
        """Count the recomputes whose inputs are still alive, as a block, known by its first module, runs again.

        Blocks that run for the same node of the graph belong to one recompute: they lie inside one another (LongCat's
        layers hold two attentions each), and what is passed between them is not an input that was restored.
        """
        block = next((outer for outer in (name, *ancestors(name)) if outer in self._blocks), None)
        if block is None or block in self._run_again:
            return
        self._run_again.add(block)
        node = current_node()
        recompute = block if node is None else sequence_number(node)
        if recompute in self._restored:
            return
        inputs = _input_storages(values, block)
        own = {storage.key for storage in inputs}
        alive = [
            earlier
            for earlier, restored in self._restored.items()
            if any(storage.is_alive and storage.key not in own for storage in restored)
        ]
        self.most_restored_alive = max(self.most_restored_alive, len(alive))
        self._restored[recompute] = inputs
        self.started_recompute.add(block)


def takes_hooks(module: nn.Module) -> bool:
    """Return whether hooks can watch a module. TorchScript's take none, and hide their attributes."""
    return not isinstance(module, torch.jit.ScriptModule)


def _innermost_parts(name: str, children: dict[str, list[str]], calls: collections.Counter[str]) -> Iterator[str]:
    """Yield the modules inside a module that are called and have none inside that is."""
    for child in children.get(name, ()):
        inner = list(_innermost_parts(child, children, calls))
        if inner:
            yield from inner
        elif calls[child]:
            yield child


def _input_storages(values: Any, block: str) -> list[TrackedStorage]:
    """Return the storages of a block's floating-point arguments: masks and indices are shared and small."""
    found: dict[int, TrackedStorage] = {}
    for leaf in pytree.tree_leaves(values):
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and not isinstance(leaf, nn.Parameter):
            storage = _track(leaf, block)
            if storage is not None:
                found[storage.key] = storage
    return list(found.values())


def _track(tensor: Tensor, block: str) -> TrackedStorage | None:
    if tensor.layout is not torch.strided or is_functorch_wrapped(tensor):
        return None
    storage = tensor.untyped_storage()
    return TrackedStorage(StorageWeakRef(storage), storage.nbytes(), block)  # type: ignore[no-untyped-call]


class Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operator: new storages in forward, random draws and counts in forward and in backward."""

    def __init__(self, calls: Calls, device: torch.device, known: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls = calls
        self._device = device.type
        self._known = [storage for storage in (_track(tensor, "") for tensor in known) if storage is not None]
        self._seen = {storage.key for storage in self._known}
        self._made: list[TrackedStorage] = []
        self.forward_draws: collections.Counter[int] = collections.Counter()
        self.backward_draws: collections.Counter[int] = collections.Counter()
        self.forward_operators: collections.Counter[tuple[str, str]] = collections.Counter()
        """Calls of the operators that compute something, by block and name."""
        self.backward_operators: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        outputs = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor)]
        if _draws(func, args, kwargs or {}):
            draws = self.backward_draws if self._calls.in_backward else self.forward_draws
            draws.update(checksum(tensor) for tensor in tensors)
        name = _computes(func)
        if self._calls.in_backward:
            self.backward_operators[name] += bool(name)
            return outputs
        self.forward_operators[self._calls.block, name] += bool(name)
        for tensor in tensors:
            self._remember(tensor)
        return outputs

    def _remember(self, tensor: Tensor) -> None:
        if tensor.device.type != self._device or type(tensor) is not Tensor:
            return
        storage = _track(tensor, self._calls.block)
        if storage is not None and storage.key not in self._seen:
            self._seen.add(storage.key)
            self._made.append(storage)

    def alive_bytes(self) -> collections.Counter[str]:
        """Return the bytes that forward made and that are still held, by block."""
        alive: collections.Counter[str] = collections.Counter()
        for storage in self._made:
            if storage.is_alive:
                alive[storage.block] += storage.nbytes
        return alive


@functools.cache
def _computes(func: Any) -> str:
    """Return an operator's name; an empty one for a view, which computes nothing."""
    schema = schema_of(func)
    return "" if any(result.alias_info is not None for result in schema.returns) else str(schema.name)


def is_attention(operator: str) -> bool:
    """Return whether an operator of this name is the forward of fused attention, whoever wrote it."""
    return bool(re.search("attention|attn", operator)) and not re.search("backward|bwd", operator)


def _draws(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether an operator draws random numbers.

    Fused attention and fused recurrent layers are tagged as if they always did, but draw with dropout only; and their
    backward is given the numbers that forward drew.
    """
    if torch.Tag.nondeterministic_seeded not in func.tags or schema_of(func).name.endswith("_backward"):
        return False
    for place, argument in enumerate(schema_of(func).arguments):
        if argument.name in ("dropout_p", "dropout"):
            return bool(args[place] if place < len(args) else kwargs.get(argument.name, argument.default_value))
    return True


class Accumulations:
    """Counts how often each parameter accumulates a gradient. DDP relies on once."""

    def __init__(self, model: nn.Module) -> None:
        self.counts: collections.Counter[str] = collections.Counter()
        self._handles = [
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                functools.partial(self._count, name)
            )
            for name, parameter in named_parameters(model)
            if parameter.requires_grad and parameter.is_leaf
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()

    def _count(self, name: str, parameter: Tensor) -> None:
        del parameter
        self.counts[name] += 1


def parameters_in_graph(loss: Tensor, model: nn.Module) -> set[str]:
    """Return the names of the parameters that the loss's graph reaches: what DDP's find_unused_parameters looks for."""
    names = {id(parameter): name for name, parameter in named_parameters(model)}
    found: set[str] = set()
    seen: set[Any] = set()
    waiting = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None and id(variable) in names:
            found.add(names[id(variable)])
        waiting.extend(next_node for next_node, _ in node.next_functions)
    return found
