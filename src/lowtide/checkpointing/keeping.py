"""Keeps the outputs of dear operators in a region's forward, and hands them out again in its recompute.

Torch's selective checkpointing sends every operator of a region through Python, which costs more than a small operator
itself. Here the first call of a region is looked at that way, and shows which parts of the region call a dear operator,
and by which functions of torch. From then on only those functions are watched, only in those parts; around their calls
alone is a dispatch mode, which sees the operators below autograd. So the graph is what it would have been: an operator
whose output was kept gets its node as always, with all that it saves, and only its kernel does not run again.

Kept outputs belong to the call, and so to its graph. With offload they are packed like the region's inputs, leave the
device and come back with them. A kept output that was changed in place is refused, as autograd would have done.
"""

from __future__ import annotations

import collections
import contextlib
import sys
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from lowtide._torch import (
    CHECKPOINT_HOOKS,
    TorchDispatchMode,
    alias_of,
    hooks_module,
    schema_of,
    storage_key,
    version_of,
)
from lowtide.checkpointing.kept_operators import KeptOperators, is_product, makes_scores, name_of
from lowtide.errors import InPlaceError, LowtideError
from lowtide.randomness import RandomState
from lowtide.tensor_tree import TensorTree, flatten

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from lowtide.checkpointing.schedule import RegionCall
    from lowtide.counters import RegionLedger


class Keeping:
    """What a region keeps, and what its calls have shown so far about where to look for it."""

    def __init__(self, operators: KeptOperators) -> None:
        self.operators = operators
        self.seen: collections.Counter[str] = collections.Counter()
        """The operators that a call of the region used, for the message if none of them is dear."""
        self.places: _Places | None = None
        """Where to look; None if the next call shall show it."""

    def begin(self, module: nn.Module | None, ledger: RegionLedger) -> KeptOutputs:
        """Begin a call of the region, whose module is `module` if it is one's forward."""
        return KeptOutputs(self, module, ledger)


def keeping_of(function: Callable[..., Any], operators: KeptOperators) -> Keeping:
    """Return what earlier calls of `function` have shown, if it lives on between calls; else begin anew."""
    owner = getattr(function, "__self__", function)
    try:
        known = _known.setdefault(owner, {})
    except TypeError:  # it cannot be referred to weakly
        return Keeping(operators)
    return known.setdefault(operators.words, Keeping(operators))


_known: weakref.WeakKeyDictionary[Any, dict[tuple[str, ...], Keeping]] = weakref.WeakKeyDictionary()
"""What is known about functions that no policy acts on. An entry dies with its function or module."""


class _Places(NamedTuple):
    """Where a region calls dear operators."""

    parts: tuple[weakref.ref[nn.Module], ...] | None
    """The parts of the region that do; None for the region as a whole."""
    functions: dict[Any, _Watched] | None
    """The functions of torch that they do it by; None if they do it in another way."""
    kept: int
    """How many outputs are kept."""


class _Watched(NamedTuple):
    """Which calls of a function are watched. One function may be both: attention, fused or written out by its mask."""

    every: bool = False
    """Whether any of them may call a dear operator."""
    products: frozenset[int] = frozenset()
    """The calls whose last product is dear, as that of attention that is written out: the how manieth they are."""


class KeptOutputs:
    """The outputs that one call of a region keeps: `keeping` around its forward, `recalling` around each recompute."""

    def __init__(self, region: Keeping, module: nn.Module | None, ledger: RegionLedger) -> None:
        self.operators = region.operators
        self.ledger = ledger
        self.call: RegionCall | None = None
        """The region's call in a schedule, if what is kept is offloaded with its inputs."""
        self._region = region
        self._places = region.places
        self._module = None if module is None else weakref.ref(module)
        self._entries: dict[Any, list[_Entry]] = collections.defaultdict(list)

    @contextlib.contextmanager
    def keeping(self) -> Iterator[None]:
        """Keep the outputs of dear operators inside."""
        if self._places is None:
            look = _Look(self, None if self._module is None else self._module())
            with look, look.functions:
                yield
            self._region.seen = look.seen
            self._region.places = look.places()
            self._places = look.places_of_all()
            return
        with _watched(self._places, _Keep(self)):
            yield
        if self.count != self._places.kept:
            self._region.places = None

    @contextlib.contextmanager
    def recalling(self) -> Iterator[None]:
        """Let dear operators return inside what they returned in forward, without computing it."""
        if self._places is None:  # the forward ended early, and asks for a gradient itself
            yield
            return
        with _watched(self._places, _Recall(self)):
            yield

    @property
    def count(self) -> int:
        """How many outputs were kept."""
        return sum(map(len, self._entries.values()))

    def keep(self, key: Any, operator: Any, output: Any, args: tuple[Any, ...], position: int = 0) -> None:
        """Keep an output of `operator`. Outputs with one key are recalled in the order in which they were kept."""
        tensors, tree = flatten(output)
        state = RandomState(*tensors) if _draws(operator, args) else None
        packed = [self._pack(tensor, operator) for tensor in tensors]
        self._entries[key].append(_Entry(packed, tree, state, position))
        self.ledger.kept_outputs += 1

    def recall(self, key: Any, operator: Any, index: int) -> Any:
        """Return the output that was kept as number `index` of its key."""
        entries = self._entries.get(key, ())
        if index >= len(entries):
            raise LowtideError(
                f"region {self.ledger.name!r}: its recompute calls {name_of(operator)} more often than its forward "
                f"did, which was {len(entries)} times, so it is not clear which output is which. Make the forward do "
                "the same whenever it runs, or leave the operator out of keep="
            )
        self.ledger.recalled_outputs += 1
        return entries[index].get()

    def position(self, key: Any) -> int | None:
        """Return which product of a function's call was kept, if one was."""
        entries = self._entries.get(key)
        return entries[0].position if entries else None

    def _pack(self, tensor: torch.Tensor, operator: Any) -> Callable[[], torch.Tensor]:
        alias = alias_of(tensor)
        if self.call is None:
            return _Held(alias, version_of(alias), self.ledger.name, name_of(operator)).get
        call, packed = self.call, self.call.pack(alias)
        return lambda: call.unpack(packed)


class _Entry(NamedTuple):
    """One kept output: how to get its tensors, where they belong, and the random state after an operator that draws."""

    packed: list[Callable[[], torch.Tensor]]
    tree: TensorTree
    state: RandomState | None
    position: int

    def get(self) -> Any:
        if self.state is not None:
            self.state.set()
        return self.tree.unflatten([alias_of(get()) for get in self.packed])


class _Held(NamedTuple):
    """A kept tensor that stays on the device, and the version that it had."""

    tensor: torch.Tensor
    version: int
    region: str
    operator: str

    def get(self) -> torch.Tensor:
        if version_of(self.tensor) != self.version:
            raise InPlaceError(
                f"region {self.region!r}: the output of {self.operator}, which keep= keeps, was modified by an inplace "
                f"operation (it was at version {self.version} and is now at version {version_of(self.tensor)}). Modify "
                f"a copy of it, for example x = x + 1 instead of x += 1, or leave {self.operator} out of keep="
            )
        return self.tensor


def _draws(operator: Any, args: tuple[Any, ...]) -> bool:
    """Return whether a call of an operator draws random numbers; attention does so only if it has dropout."""
    if torch.Tag.nondeterministic_seeded not in getattr(operator, "tags", ()):
        return False
    schema = schema_of(operator)
    names = [] if schema is None else [argument.name for argument in schema.arguments]
    if "dropout_p" not in names:
        return True
    index = names.index("dropout_p")
    return index < len(args) and bool(args[index])


# --- Where to look --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _watched(places: _Places, mode: _Mode) -> Iterator[None]:
    """Let `mode` see the operators that are called in these places."""
    functions = mode if places.functions is None else _Functions(places.functions, mode)
    if places.parts is None:
        with functions:
            yield
        return
    with contextlib.ExitStack() as stack:
        for reference in places.parts:
            if (part := reference()) is not None:
                stack.enter_context(_forward_within(part, functions))
        yield


@contextlib.contextmanager
def _forward_within(part: nn.Module, context: Any) -> Iterator[None]:
    """Let a module's forward run within `context` for a while. It is the module's own again afterwards."""
    held, forward = vars(part), part.forward

    def within(*args: Any, **kwargs: Any) -> Any:
        with context:
            return forward(*args, **kwargs)

    replaced = held.get("forward")
    held["forward"] = within
    try:
        yield
    finally:
        if replaced is None:
            del held["forward"]
        else:
            held["forward"] = replaced


class _Functions(TorchFunctionMode):
    """Lets a dispatch mode see what some functions of torch do, and nothing else."""

    def __init__(self, functions: dict[Any, _Watched], mode: _Mode) -> None:
        super().__init__()
        self._functions = functions
        self._mode = mode
        self._turn: collections.Counter[Any] = collections.Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in self._functions:
            return func(*args, **kwargs) if kwargs else func(*args)
        turn, watched = self._turn[func], self._functions[func]
        self._turn[func] += 1
        if not watched.every and turn not in watched.products:
            return func(*args, **(kwargs or {}))
        with self._mode, self._mode.within((func, turn) if turn in watched.products else None):
            return func(*args, **(kwargs or {}))


class _Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees the operators that are dear, where a checkpoint decides what is saved: not those inside a tile."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # what is compiled inside stays compiled

    def __init__(self, outputs: KeptOutputs) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._outputs = outputs
        self._operators = outputs.operators
        self._function: Any = None
        """The call of a function whose last product is dear: the function, and the how manieth of its calls it is."""
        self._products = 0

    @contextlib.contextmanager
    def within(self, function: tuple[Any, int] | None) -> Iterator[None]:
        """Take the last product inside for dear, as that of written-out attention."""
        self._function, self._products = function, 0
        try:
            yield
        finally:
            self._function = None


class _Keep(_Mode):  # type: ignore[no-untyped-call]
    """Keeps what dear operators return."""

    _last: tuple[Any, Any, Any, int] | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if hooks_module() != CHECKPOINT_HOOKS:
            return output
        if func in self._operators:
            self._outputs.keep(func, func, output, args)
        elif self._function is not None and is_product(func):
            self._last = (func, output, args, self._products)
            self._products += 1
        return output

    @contextlib.contextmanager
    def within(self, function: tuple[Any, int] | None) -> Iterator[None]:
        with super().within(function):
            yield
        if self._last is not None:
            self._outputs.keep(function, *self._last)
            self._last = None


class _Recall(_Mode):  # type: ignore[no-untyped-call]
    """Returns what dear operators returned in forward, instead of calling them."""

    def __init__(self, outputs: KeptOutputs) -> None:
        super().__init__(outputs)
        self._turn: collections.Counter[Any] = collections.Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        key = None
        if func in self._operators:
            key = func
        elif self._function is not None and is_product(func):
            key = self._function if self._products == self._outputs.position(self._function) else None
            self._products += 1
        if key is None or hooks_module() != CHECKPOINT_HOOKS:
            return func(*args, **(kwargs or {}))
        turn = self._turn[key]
        self._turn[key] += 1
        return self._outputs.recall(key, func, turn)


# --- A close look ---------------------------------------------------------------------------------------------------


class _Look(_Keep):  # type: ignore[no-untyped-call]
    """Keeps what dear operators return in a whole region, and notes by which functions and parts they were called.

    Attention that is written out is told by its data: it is the product that gets what a softmax has made.
    """

    def __init__(self, outputs: KeptOutputs, region: nn.Module | None) -> None:
        super().__init__(outputs)
        self.seen: collections.Counter[str] = collections.Counter()
        self.functions = _AllFunctions(region)
        self._region = region
        self._scores: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        self.seen[name_of(func)] += 1
        if hooks_module() != CHECKPOINT_HOOKS:
            return output
        call = self.functions.running
        if func in self._operators:
            self._outputs.keep(func, func, output, args)
            (call or self.functions.note(None)).is_dear = True
        elif call is not None and self._operators.wants_written_out_attention:
            self._follow_scores(call, func, args, output)
        return output

    def _follow_scores(self, call: _Call, func: Any, args: Any, output: Any) -> None:
        """Keep the product of a softmax's output and something else."""
        if is_product(func):
            if any(self._is_scores(value) for value in args):
                self._outputs.keep((call.function, call.turn), func, output, args, call.products)
                call.has_dear_product = True
                self._scores.clear()
            call.products += 1
            return
        given = [value for value in args if self._is_scores(value)]
        made = output[0] if isinstance(output, tuple) else output
        if isinstance(made, torch.Tensor) and (makes_scores(func) or any(made.numel() == v.numel() for v in given)):
            self._scores.append(made)

    def _is_scores(self, value: Any) -> bool:
        if not self._scores or not isinstance(value, torch.Tensor):
            return False
        storage = storage_key(value.untyped_storage())
        return any(storage_key(scores.untyped_storage()) == storage for scores in self._scores)

    def places(self) -> _Places:
        """Return where the region calls dear operators: in as few parts and by as few functions as possible."""
        parts = {call.part for call in self.functions.calls if call.is_dear or call.has_dear_product}
        if None in parts or self._region in parts:
            return self.places_of_all()
        inner = {part for outer in parts for part in outer.modules() if part is not outer}  # type: ignore[union-attr]
        return self._places([part for part in parts if part not in inner])

    def places_of_all(self) -> _Places:
        """Return where it does so among all that the region does."""
        return self._places(None)

    def _places(self, parts: list[Any] | None) -> _Places:
        inside = None if parts is None else {part for outer in parts for part in outer.modules()}
        calls = [call for call in self.functions.calls if inside is None or call.part in inside]
        count = self._outputs.count
        references = None if parts is None else tuple(map(weakref.ref, parts))
        if any(call.is_dear and call.function is None for call in calls):
            return _Places(references, None, count)
        functions: dict[Any, _Watched] = {}
        turn: collections.Counter[Any] = collections.Counter()
        for call in calls:
            if call.is_dear or call.has_dear_product:
                known = functions.get(call.function, _Watched())
                products = known.products | ({turn[call.function]} if call.has_dear_product else set())
                functions[call.function] = _Watched(known.every or call.is_dear, products)
            turn[call.function] += 1
        return _Places(references, functions, count)


class _Call:
    """A call of one of torch's functions in a region, and what it reached."""

    def __init__(self, function: Any, turn: int, part: nn.Module | None) -> None:
        self.function = function
        self.turn = turn
        self.part = part
        self.products = 0
        self.is_dear = False
        self.has_dear_product = False


class _AllFunctions(TorchFunctionMode):
    """Notes all calls of torch's functions in a region."""

    def __init__(self, region: nn.Module | None) -> None:
        super().__init__()
        self.calls: list[_Call] = []
        self.running: _Call | None = None
        self._parts = set() if region is None else set(region.modules())
        self._turn: collections.Counter[Any] = collections.Counter()

    def note(self, function: Any) -> _Call:
        """Note a call; with None, that of an operator which no function of torch has called."""
        call = _Call(function, self._turn[function], self._running_part())
        self._turn[function] += 1
        self.calls.append(call)
        return call

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.running = self.note(func)
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.running = None

    def _running_part(self) -> nn.Module | None:
        """Return the innermost part of the region whose code runs."""
        frame = sys._getframe(1) if self._parts else None
        while frame is not None:
            holder = frame.f_locals.get("self")
            if isinstance(holder, nn.Module) and holder in self._parts:
                return holder
            frame = frame.f_back
        return None
