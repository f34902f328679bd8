"""Watches the calls of dear operators in a region: keeps what they return, or recalls it.

A dispatch mode sees operators below autograd, so the graph is what it would have been: an operator whose output was
kept gets its node as always, with all that it saves, and only its kernel does not run again. But such a mode sends
every operator through Python, which costs more than a small operator itself. So it is only around those calls of
torch's functions that reach a dear operator, in those parts of the region where they are (`Places`). A close look at a
whole call (`Look`) shows which these are.
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

from lowtide._torch import CHECKPOINT_HOOKS, COMPILED_CALL, TorchDispatchMode, hooks_module, is_compiled, storage_key
from lowtide.checkpointing.kept_operators import hides_changes, is_product, makes_scores, name_of
from lowtide.checkpointing.kept_outputs import COMPUTE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from lowtide.checkpointing.kept_outputs import KeptOutputs


class _Calls(NamedTuple):
    """Which calls of a function reach a dear operator."""

    has_operators: bool = False
    """Whether any call may reach one that is dear by its name."""
    products: frozenset[int] = frozenset()
    """The calls, numbered from the region's beginning, whose last product is that of written-out attention."""


class Places(NamedTuple):
    """Where a region calls dear operators."""

    parts: tuple[weakref.ref[nn.Module], ...] | None
    """The parts of the region that do; None for the region as a whole."""
    functions: dict[Any, _Calls] | None
    """The functions of torch that they do it by; None if they do it in another way."""
    kept: int
    """How many outputs are kept."""
    compiled: tuple[weakref.ref[nn.Module], ...] = ()
    """The parts that are compiled: what they do is left to the compiler."""


def run_watched(
    places: Places, mode: _Mode, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run a region, and let `mode` see the operators that it calls in these places."""
    functions = mode if places.functions is None else _Functions(places.functions, mode)
    if places.compiled:
        function = _within(left_alone(places.compiled, mode.switch), function)
    if places.parts is None:
        with functions:
            return function(*args, **kwargs)
    replaced = []
    try:
        for part in (reference() for reference in places.parts):
            if part is not None:
                replaced.append((vars(part), vars(part).get("forward")))
                vars(part)["forward"] = _within(functions, part.forward)
        return function(*args, **kwargs)
    finally:
        for held, forward in replaced:
            if forward is None:
                del held["forward"]
            else:
                held["forward"] = forward


def _within(context: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that runs within a context. One takes a forward's place while a region runs, and no longer."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with context:
            return function(*args, **kwargs)

    return run


class _Switch:
    """Says whether modes look at what is called. As a context, it lets them look away."""

    def __init__(self) -> None:
        self.off = 0

    def __enter__(self) -> None:
        self.off += 1

    def __exit__(self, *exception: object) -> None:
        self.off -= 1


@contextlib.contextmanager
def left_alone(parts: Iterable[weakref.ref[nn.Module]], switch: _Switch) -> Iterator[None]:
    """Let modes look away while compiled parts run: what is in a compiled graph is the compiler's business."""
    replaced = []
    try:
        for part in (reference() for reference in parts):
            if part is not None:
                name = COMPILED_CALL if vars(part).get(COMPILED_CALL) is not None else "forward"
                replaced.append((vars(part), name, vars(part)[name]))
                vars(part)[name] = _within(switch, vars(part)[name])
        yield
    finally:
        for held, name, call in replaced:
            held[name] = call


class _Functions(TorchFunctionMode):
    """Lets a dispatch mode see what some functions of torch do, and nothing else."""

    def __init__(self, functions: dict[Any, _Calls], mode: _Mode) -> None:
        super().__init__()
        self._functions = functions
        self._mode = mode
        self._turn: collections.Counter[Any] = collections.Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.compiler.is_dynamo_compiling() or func not in self._functions or self._mode.switch.off:
            return func(*args, **kwargs) if kwargs else func(*args)
        turn, calls = self._turn[func], self._functions[func]
        self._turn[func] += 1
        has_product = turn in calls.products
        if not has_product and not calls.has_operators:
            return func(*args, **(kwargs or {}))
        mode = self._mode
        mode.begin((func, turn) if has_product else None)
        with mode:
            result = func(*args, **(kwargs or {}))
        mode.end()
        return result


class _Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees the operators that are dear, where a checkpoint decides what is saved: not those inside a tile."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # what is compiled inside stays compiled

    def __init__(self, outputs: KeptOutputs) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.switch = _Switch()
        self._outputs = outputs
        self._operators = outputs.operators
        self._function: Any = None
        """The call of a function whose last product is dear: the function, and the how manieth of its calls it is."""
        self._products = 0

    def begin(self, function: tuple[Any, int] | None) -> None:
        """Begin a call of a function. If it is named, its last product is dear, as that of written-out attention."""
        self._function, self._products = function, 0

    def end(self) -> None:
        """End the call."""
        self._function = None


class Keep(_Mode):  # type: ignore[no-untyped-call]
    """Keeps what dear operators return."""

    def __init__(self, outputs: KeptOutputs) -> None:
        super().__init__(outputs)
        self._last: tuple[Any, Any, Any, int] | None = None
        """The last product of the function that runs, if that is dear."""
        self._views: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if self.switch.off or hooks_module() != CHECKPOINT_HOOKS:
            return output
        if func in self._operators:
            self._outputs.keep(func, func, output, args)
        elif self._function is not None and is_product(func):
            self._last, self._views = (func, output, args, self._products), []
            self._products += 1
        elif hides_changes(func):
            self._outputs.watch(output)
            self._views.append(output)
        return output

    def end(self) -> None:
        if self._last is not None:
            self._outputs.keep(self._function, *self._last)
            for view in self._views:
                self._outputs.watch(view)
        self._last, self._views = None, []
        super().end()


class Recall(_Mode):  # type: ignore[no-untyped-call]
    """Returns what dear operators returned in forward, instead of calling them."""

    def __init__(self, outputs: KeptOutputs) -> None:
        super().__init__(outputs)
        self._turn: collections.Counter[Any] = collections.Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        key = None
        if self.switch.off:
            return func(*args, **(kwargs or {}))
        if func in self._operators:
            key = func
        elif self._function is not None and is_product(func):
            key = self._function if self._products == self._outputs.position(self._function) else None
            self._products += 1
        if key is None or hooks_module() != CHECKPOINT_HOOKS:
            return func(*args, **(kwargs or {}))
        turn = self._turn[key]
        self._turn[key] += 1
        recalled = self._outputs.recall(key, func, turn)
        return func(*args, **(kwargs or {})) if recalled is COMPUTE else recalled


# --- A close look ---------------------------------------------------------------------------------------------------


class Look(Keep):  # type: ignore[no-untyped-call]
    """Keeps what dear operators return in a whole region, and notes by which functions and parts they were called.

    Attention that is written out is told by its data: it is the product that gets what a softmax has made.
    """

    def __init__(self, outputs: KeptOutputs, region: nn.Module | None) -> None:
        super().__init__(outputs)
        self.seen: collections.Counter[str] = collections.Counter()
        parts = [] if region is None else [part for part in region.modules() if part is not region]
        self.compiled = tuple(weakref.ref(part) for part in parts if is_compiled(part))
        self.functions = _AllFunctions(region, self.switch)
        self._region = region
        self._scores: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if self.switch.off:
            return output
        self.seen[name_of(func)] += 1
        if hooks_module() != CHECKPOINT_HOOKS:
            return output
        call = self.functions.running
        if func in self._operators:
            self._outputs.keep(func, func, output, args)
            (call or self.functions.note(None)).operators += 1
        elif hides_changes(func):
            self._outputs.watch(output)
        elif call is not None and self._operators.wants_written_out_attention:
            self._follow_scores(call, func, args, output)
        return output

    def _follow_scores(self, call: _Call, func: Any, args: Any, output: Any) -> None:
        """Keep the product of a softmax's output and something else."""
        if is_product(func):
            if any(self._is_scores(value) for value in args):
                self._outputs.keep((call.function, call.turn), func, output, args, call.products)
                call.dear_products += 1
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

    def places(self) -> Places:
        """Return where the region calls dear operators: in as few parts and by as few functions as possible."""
        parts = {call.part for call in self.functions.calls if call.kept}
        if None in parts or self._region in parts:
            return self.places_of_all()
        inner = {part for outer in parts for part in outer.modules() if part is not outer}  # type: ignore[union-attr]
        return self._places([part for part in parts if part not in inner])

    def places_of_all(self) -> Places:
        """Return where it does so among all that the region does."""
        return self._places(None)

    def _places(self, parts: list[Any] | None) -> Places:
        inside = None if parts is None else {part for outer in parts for part in outer.modules()}
        calls = [call for call in self.functions.calls if inside is None or call.part in inside]
        count = self._outputs.count
        references = None if parts is None else tuple(map(weakref.ref, parts))
        if sum(call.kept for call in calls) != count:  # the compiler has looked at our notes, and undone some
            return Places(None, None, count, self.compiled)
        if any(call.operators and call.function is None for call in calls):
            return Places(references, None, count, self.compiled)
        functions: dict[Any, _Calls] = {}
        turn: collections.Counter[Any] = collections.Counter()
        for call in calls:
            known, number = functions.get(call.function, _Calls()), turn[call.function]
            turn[call.function] += 1
            if call.operators:
                functions[call.function] = known._replace(has_operators=True)
            elif call.dear_products:
                functions[call.function] = known._replace(products=known.products | {number})
        return Places(references, functions, count, self.compiled)


class _Call:
    """A call of one of torch's functions in a region, and what it reached."""

    def __init__(self, function: Any, turn: int, part: nn.Module | None) -> None:
        self.function = function
        self.turn = turn
        self.part = part
        self.products = 0
        self.operators = 0
        """How many outputs were kept of operators that are dear by their name."""
        self.dear_products = 0

    @property
    def kept(self) -> int:
        return self.operators + self.dear_products


class _AllFunctions(TorchFunctionMode):
    """Notes all calls of torch's functions in a region."""

    def __init__(self, region: nn.Module | None, switch: _Switch) -> None:
        super().__init__()
        self._switch = switch
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
        if torch.compiler.is_dynamo_compiling() or self._switch.off:  # the compiler looks into this: no notes
            return func(*args, **(kwargs or {}))
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
