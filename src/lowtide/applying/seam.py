"""The seam: an object in a module's instance dictionary that takes the place of its `forward`.

Hooks of the module (FSDP's, DeepSpeed's, a user's) stay outside it. It knows its module, so a deep copy or an unpickled
model calls its own parameters; and it is active only in the model that the policy was applied to: a copy runs plainly.

Who keeps whom alive: a module holds its seam, and a seam holds its runtime and the handle that installed it. So a
policy stays in force when the caller drops the handle, and dies with the model. In the other direction all references
are weak: a seam knows its module weakly and a handle knows its seams weakly, so that a model dies with its last
reference as it did before.

To those who look at it, it is the module's forward: it has its signature, by which the Trainer chooses a batch's
columns, and a function that can be bound again, as accelerate does.

A module that is compiled in place (`module.compile()`, before or after the policy) has its forward compiled inside the
seam. In the graph of compiled code around it, a seam is a break; what it runs inside is compiled as it would have been.
"""

from __future__ import annotations

import copy
import inspect
import types
import weakref
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, Self

import torch

from lowtide._torch import (
    COMPILED_CALL,
    CompiledCall,
    compiled_like,
    graph_break,
    make_data_parallel_refuse,
    parameters_of,
    send_compiler_away,
    swap_compiler,
)
from lowtide.errors import LowtideError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn


IS_NO_GRAPH = (
    "this is the seam of a Lowtide policy, which acts on a module and is no part of a graph. Compile without "
    "fullgraph=True; or compile each of the model's layers, in place: layer.compile(fullgraph=True). A policy that "
    "acts inside of a layer, as tile(mlp) does, breaks its graph, too: compile such layers without fullgraph=True"
)
"""What torch says of a seam if it is to be in a graph."""


class Runtime(Protocol):
    """What a seam does while a policy is in force. It stays in this process."""

    def is_active(self, module: nn.Module) -> bool:
        """Return whether to act on this call; otherwise the module's forward runs plainly."""

    def run(self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the module's `forward` under the policy and return its output."""


class Handle(Protocol):
    """Whatever installed some seams and can take them away again."""

    def remove(self) -> None:
        """Remove the seams."""

    def note_copy(self, module: nn.Module) -> None:
        """Take note that a copy of a module with a seam is trained, which the policy does not act on."""


class Seam:
    """Takes the place of one module's `forward`, and does what its runtime says."""

    def __init__(self, module: nn.Module, runtime: Runtime | None, handle: Handle | None) -> None:
        self.runtime = runtime
        self.handle = handle
        """The handle that installed this seam; None once it is removed, and in copies."""
        self.copied_from: weakref.ref[Handle] | None = None
        """In a copy that has not been trained yet: the handle of what was copied."""
        self.replaced = _below_ended_seams(module.__dict__.get("forward"))  # somebody else's, if there was one
        self._module = weakref.ref(module)
        self._compiled: _Compiled | None = None

    @property
    def module(self) -> nn.Module:
        """The module. It can be gone only if this object was kept beyond it."""
        module = self._module()
        if module is None:
            raise LowtideError("the module of this forward is gone: call the module, not a forward taken from it")
        return module

    @graph_break(IS_NO_GRAPH)
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        compiler = send_compiler_away()
        try:
            return self.call_on(self.module, compiler, args, kwargs)
        finally:
            swap_compiler(compiler)

    def call_on(self, module: nn.Module, compiler: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the forward of the module, or of one that shares all it has, without the compiler around it."""
        forward = self._original_forward(module)
        if self._compiled is not None:
            forward = self._compiled.forward
        elif compiler is not None:
            forward = CompiledCall(forward, compiler)
        if self.copied_from is not None and module.training and torch.is_grad_enabled():
            self._tell_of_copy(module)
        if self.runtime is None or not self.runtime.is_active(module):
            return forward(*args, **kwargs)
        return self.runtime.run(module, forward, args, kwargs)

    def _tell_of_copy(self, module: nn.Module) -> None:
        """Tell the handle once that this copy is trained: it may stand where the original was."""
        handle = None if self.copied_from is None else self.copied_from()
        self.copied_from = None
        if handle is not None:
            handle.note_copy(module)

    @property
    def is_activation_policy(self) -> bool:
        """Whether a policy is in force here. The audit asks a forward for it, without knowing this class."""
        return self.runtime is not None

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._original_forward(self.module))

    @property
    def __self__(self) -> nn.Module | None:
        return self._module()

    @property
    def __func__(self) -> _Unbound:
        return _Unbound(self)

    def _original_forward(self, module: nn.Module) -> Callable[..., Any]:
        """Return the module's forward as it was. It holds the module: a backward may outlive the model's last name."""
        if self.replaced is None:
            return type(module).forward.__get__(module)  # type: ignore[no-any-return]
        if module is not self._module() and hasattr(self.replaced, "__func__"):
            return types.MethodType(self.replaced.__func__, module)
        return self.replaced  # type: ignore[no-any-return]

    def install(self) -> None:
        """Put this in the place of the module's forward."""
        module = self.module
        if not isinstance(self.replaced, Seam):
            ended = _compiled_of_ended_seams(module.__dict__.get("forward"))
            self._compiled = ended or _Compiled.take(module, self._original_forward(module))
        module.__dict__["forward"] = self
        module.__dict__["compile"] = _CompileInside(self)
        make_data_parallel_refuse(module, _refuse_data_parallel)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the module's forward inside this seam: what `module.compile()` means while a policy is in force."""
        if isinstance(self.replaced, Seam):
            self.replaced.compile(*args, **kwargs)
        else:
            self._compiled = _Compiled(self._original_forward(self.module), args, kwargs)

    def remove(self) -> None:
        """Put back what was replaced, or run plainly from now on if somebody has wrapped this seam since."""
        self.runtime = self.handle = None
        module = self._module()
        if module is None or module.__dict__.get("forward") is not self:
            return
        if self.replaced is not None:
            module.__dict__["forward"] = self.replaced
        else:
            del module.__dict__["forward"]
        if isinstance(self.replaced, Seam):
            module.__dict__["compile"] = _CompileInside(self.replaced)
            return
        del module.__dict__["compile"]
        make_data_parallel_refuse(module, None)
        if self._compiled is not None:
            self._compiled.give_back(module)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out runtime and handle: copies and pickles run plainly, for streams and pinned memory stay here."""
        return {"module": self._module(), "replaced": self.replaced}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.runtime = self.handle = self._compiled = self.copied_from = None
        self.replaced = state["replaced"]
        self._module = weakref.ref(state["module"])

    def __deepcopy__(self, memo: dict[int, Any]) -> Seam:
        twin = Seam.__new__(Seam)
        memo[id(self)] = twin
        twin.__setstate__({name: copy.deepcopy(value, memo) for name, value in self.__getstate__().items()})
        twin.copied_from = self.copied_from if self.handle is None else weakref.ref(self.handle)
        return twin


class _Compiled:
    """A forward that is compiled because its module is, in place; and how the module was compiled."""

    def __init__(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.forward = torch.compile(forward, *args, **kwargs)
        self._settings: tuple[tuple[Any, ...], dict[str, Any]] | None = (args, kwargs)
        self._call: Any = None
        """What torch had put into the module, if that was before the policy."""

    @classmethod
    def take(cls, module: nn.Module, forward: Callable[..., Any]) -> Self | None:
        """Take over a module that is compiled in place; None if it is not."""
        call = module.__dict__.get(COMPILED_CALL)
        function = None if call is None else compiled_like(call, forward)
        if function is None:
            return None
        taken = cls.__new__(cls)
        taken.forward, taken._settings, taken._call = function, None, call
        module.__dict__[COMPILED_CALL] = None
        return taken

    def give_back(self, module: nn.Module) -> None:
        """Let the module be compiled in place again, as torch would have it."""
        if self._settings is None:
            module.__dict__[COMPILED_CALL] = self._call
        else:
            args, kwargs = self._settings
            module.compile(*args, **kwargs)


class _CompileInside:
    """Takes the place of a module's method `compile`, as long as it has seams."""

    def __init__(self, seam: Seam) -> None:
        self._seam = seam

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self._seam.compile(*args, **kwargs)


def _below_ended_seams(forward: Any) -> Any:
    """Return what is below seams that run plainly: a copy of a model has them."""
    while isinstance(forward, Seam) and forward.runtime is None:
        forward = forward.replaced
    return forward


def _compiled_of_ended_seams(forward: Any) -> _Compiled | None:
    """Return how a copy of a model was compiled in place, which its seams, that run plainly, know."""
    found = None
    while isinstance(forward, Seam) and forward.runtime is None:
        found, forward = forward._compiled or found, forward.replaced
    return found


def seams_of(module: nn.Module) -> Iterator[Seam]:
    """Yield the seams in force on a module itself, outermost first."""
    seam = module.__dict__.get("forward")
    while isinstance(seam, Seam):
        if seam.runtime is not None:
            yield seam
        seam = seam.replaced


class _Unbound:
    """A seam as a plain function of its module, which can be bound to a module again; on a copy it runs plainly.

    accelerate's `compile_regions` binds it to another module with the same parameters and buffers, and with compiled
    parts in the places of these: there, the policy acts.
    """

    def __init__(self, seam: Seam) -> None:
        self._seam = seam

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(type(self._seam.module).forward)

    @graph_break(IS_NO_GRAPH)
    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        compiler = send_compiler_away()
        try:
            own = self._seam._module()
            if own is not None and parameters_of(module) is parameters_of(own):
                return self._seam.call_on(module, compiler, args, kwargs)
            forward = type(module).forward.__get__(module)
            return (forward if compiler is None else CompiledCall(forward, compiler))(*args, **kwargs)
        finally:
            swap_compiler(compiler)


def _refuse_data_parallel() -> NoReturn:
    """Refuse `nn.DataParallel`, which copies attributes: its replicas would run the original, on its device."""
    raise LowtideError(
        "nn.DataParallel cannot run a model with a Lowtide policy: use DistributedDataParallel (torchrun), "
        "or make one GPU visible (CUDA_VISIBLE_DEVICES=0)"
    )
