"""The seam: an object in a module's instance dictionary that takes the place of its `forward`.

Hooks of the module (FSDP's, DeepSpeed's, a user's) stay outside it. It knows its module, so a deep copy or an unpickled
model calls its own parameters; and it is active only in the model that the policy was applied to: a copy runs plainly.

Who keeps whom alive: a module holds its seam, and a seam holds its runtime and the handle that installed it. So a
policy stays in force when the caller drops the handle, and dies with the model. In the other direction all references
are weak: a seam knows its module weakly and a handle knows its seams weakly, so that a model dies with its last
reference as it did before.

To those who look at it, it is the module's forward: it has its signature, by which the Trainer chooses a batch's
columns, and a function that can be bound again, as accelerate does.
"""

from __future__ import annotations

import copy
import inspect
import weakref
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from lowtide._torch import disable_dynamo, make_data_parallel_refuse
from lowtide.errors import LowtideError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn


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


class Seam:
    """Takes the place of one module's `forward`, and does what its runtime says."""

    def __init__(self, module: nn.Module, runtime: Runtime | None, handle: Handle | None) -> None:
        self.runtime = runtime
        self.handle = handle
        """The handle that installed this seam; None once it is removed, and in copies."""
        self.replaced = _below_ended_seams(module.__dict__.get("forward"))  # somebody else's, if there was one
        self._module = weakref.ref(module)

    @property
    def module(self) -> nn.Module:
        """The module. It can be gone only if this object was kept beyond it."""
        module = self._module()
        if module is None:
            raise LowtideError("the module of this forward is gone: call the module, not a forward taken from it")
        return module

    # To torch.compile this is a break of the graph: what is inside runs eagerly, unless it is compiled itself.
    @disable_dynamo
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self.module
        forward = self._original_forward(module)
        if self.runtime is None or not self.runtime.is_active(module):
            return forward(*args, **kwargs)
        return self.runtime.run(module, forward, args, kwargs)

    @property
    def is_activation_policy(self) -> bool:
        """Whether a policy is in force here. The audit asks a forward for it, without knowing this class."""
        return self.runtime is not None

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._original_forward(self.module))

    @property
    def __func__(self) -> _Unbound:
        return _Unbound(self)

    def _original_forward(self, module: nn.Module) -> Callable[..., Any]:
        """Return the module's forward as it was. It holds the module: a backward may outlive the model's last name."""
        if self.replaced is not None:
            return self.replaced  # type: ignore[no-any-return]
        return type(module).forward.__get__(module)  # type: ignore[no-any-return]

    def install(self) -> None:
        """Put this in the place of the module's forward."""
        self.module.__dict__["forward"] = self
        make_data_parallel_refuse(self.module, _refuse_data_parallel)

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
        if not isinstance(self.replaced, Seam):
            make_data_parallel_refuse(module, None)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out runtime and handle: copies and pickles run plainly, for streams and pinned memory stay here."""
        return {"module": self._module(), "replaced": self.replaced}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.runtime = self.handle = None
        self.replaced = state["replaced"]
        self._module = weakref.ref(state["module"])

    def __deepcopy__(self, memo: dict[int, Any]) -> Seam:
        twin = Seam.__new__(Seam)
        memo[id(self)] = twin
        twin.__setstate__({name: copy.deepcopy(value, memo) for name, value in self.__getstate__().items()})
        return twin


def _below_ended_seams(forward: Any) -> Any:
    """Return what is below seams that run plainly: a copy of a model has them."""
    while isinstance(forward, Seam) and forward.runtime is None:
        forward = forward.replaced
    return forward


def seams_of(module: nn.Module) -> Iterator[Seam]:
    """Yield the seams in force on a module itself, outermost first."""
    seam = module.__dict__.get("forward")
    while isinstance(seam, Seam):
        if seam.runtime is not None:
            yield seam
        seam = seam.replaced


class _Unbound:
    """A seam as a plain function of its module, which can be bound to a module again; on a copy it runs plainly."""

    def __init__(self, seam: Seam) -> None:
        self._seam = seam

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(type(self._seam.module).forward)

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if module is not self._seam._module():
            return type(module).forward(module, *args, **kwargs)
        return self._seam(*args, **kwargs)


def _refuse_data_parallel() -> NoReturn:
    """Refuse `nn.DataParallel`, which copies attributes: its replicas would run the original, on its device."""
    raise LowtideError(
        "nn.DataParallel cannot run a model with a Lowtide policy: use DistributedDataParallel (torchrun), "
        "or make one GPU visible (CUDA_VISIBLE_DEVICES=0)"
    )
