"""Logits that are not computed: what a head returns when its loss is to be computed in tiles.

A model's own code continues from the head as ever: it may scale the logits, apply a softcap, cast, shift, mask and
flatten them, and in the end call `torch.nn.functional.cross_entropy`. `DeferredLogits` follows those steps on the
hidden states, which have the same tokens, and answers that last call with the loss in tiles. So the loss is the model's
own: its shift, its ignored labels, its divisor. Anything else is refused, with the remedy.

It is deliberately not a tensor: many programs look through a model's outputs for tensors and compute with them. The
hidden states, which DistributedDataParallel finds in it, are in the loss's graph as well.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.nn import functional as F

from lowtide.errors import LogitsNotComputedError

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclasses.dataclass(frozen=True)
class LossRequest:
    """A request for the loss of `after * tanh(before * (logits + bias))`; without `after`, of what is in the tanh."""

    labels: torch.Tensor
    bias: torch.Tensor | None
    before: float
    after: float | None
    ignore_index: int
    reduction: str
    label_smoothing: float


@dataclasses.dataclass(frozen=True, eq=False)
class DeferredLogits:
    """The logits of some hidden states, with a bias, a scale and a softcap still to be applied."""

    hidden: torch.Tensor
    classes: int
    dtype: torch.dtype
    make_loss: Callable[[torch.Tensor, LossRequest], torch.Tensor]
    make_logits: Callable[[torch.Tensor], torch.Tensor]
    bias: torch.Tensor | None = None
    before: float = 1.0
    after: float | None = None

    # Questions that code asks a tensor before it computes with it

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.hidden.shape[:-1], self.classes))

    @property
    def device(self) -> torch.device:
        return self.hidden.device

    @property
    def ndim(self) -> int:
        return self.hidden.dim()

    @property
    def requires_grad(self) -> bool:
        return True

    def __len__(self) -> int:
        return self.shape[0]

    def dim(self) -> int:
        return self.hidden.dim()

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    # Steps that change which tokens there are, or nothing at all

    def float(self) -> DeferredLogits:
        return dataclasses.replace(self, dtype=torch.float32)

    def to(self, *args: Any, **kwargs: Any) -> DeferredLogits:
        """Note a cast; a device is ignored: the loss is computed in single precision where the hidden states are."""
        wanted = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.dtype)]
        return dataclasses.replace(self, dtype=wanted[0]) if wanted else self

    def contiguous(self) -> DeferredLogits:
        return self

    def view(self, *shape: Any) -> DeferredLogits:
        return self.reshape(*shape)

    def reshape(self, *shape: Any) -> DeferredLogits:
        sizes = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape
        keeps_classes = sizes[-1:] == (self.classes,)
        if sizes[-1:] == (-1,):  # these are the classes if the other sizes account for all tokens
            keeps_classes = math.prod(sizes[:-1]) == self.hidden.shape[:-1].numel()
        if not keeps_classes:
            raise self._refuse(f"reshaped to {sizes}")
        return dataclasses.replace(self, hidden=self.hidden.reshape(*sizes[:-1], self.hidden.shape[-1]))

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> DeferredLogits:
        end = end_dim % self.dim()
        if end == self.dim() - 1:
            raise self._refuse("flattened with their classes")
        return dataclasses.replace(self, hidden=self.hidden.flatten(start_dim, end))

    def __getitem__(self, index: Any) -> DeferredLogits:
        """Choose tokens, in any way; choosing classes is refused."""
        if isinstance(index, tuple) and index[0] is Ellipsis and isinstance(index[-1], slice):
            takes_all = index[-1].indices(self.classes) == (0, self.classes, 1)
            index = (*index[:-1], slice(None)) if takes_all else index
        for classes in (self.classes, self.classes + 1):  # an index that keeps both does not touch classes
            tried = torch.empty((*self.hidden.shape[:-1], classes), device="meta")
            if self._on_meta(tried, index).shape[-1:] != (classes,):
                raise self._refuse(f"indexed with {index}")
        return dataclasses.replace(self, hidden=self.hidden[index])

    def __setitem__(self, index: Any, value: Any) -> NoReturn:
        raise self._refuse("written to")  # Chameleon bans image tokens this way

    @staticmethod
    def _on_meta(tried: torch.Tensor, index: Any) -> torch.Tensor:
        """Apply an index to a meta tensor. A mask becomes positions first: its values say how many it chooses."""
        parts = index if isinstance(index, tuple) else (index,)
        places: list[Any] = []
        for part in parts:
            if isinstance(part, torch.Tensor) and part.dtype is torch.bool:
                places += [place.to("meta") for place in part.nonzero(as_tuple=True)]
            else:
                places.append(part.to("meta") if isinstance(part, torch.Tensor) else part)
        return tried[tuple(places)]

    # Steps that change values

    def __add__(self, bias: Any) -> DeferredLogits:
        is_bias = isinstance(bias, torch.Tensor) and bias.numel() == self.classes == bias.shape[-1]
        if not is_bias or self.bias is not None or (self.before, self.after) != (1.0, None):
            raise self._refuse(f"added to {type(bias).__name__}")
        return dataclasses.replace(self, bias=bias)

    __radd__ = __add__

    def __mul__(self, factor: Any) -> DeferredLogits:
        if not isinstance(factor, int | float):
            raise self._refuse(f"multiplied with {type(factor).__name__}")
        if self.after is not None:
            return dataclasses.replace(self, after=self.after * factor)
        return dataclasses.replace(self, before=self.before * factor)

    __rmul__ = __mul__

    def __truediv__(self, factor: Any) -> DeferredLogits:
        if not isinstance(factor, int | float):
            raise self._refuse(f"divided by {type(factor).__name__}")
        return self * (1 / factor)

    def _refuse_operator(self, *_others: Any) -> NoReturn:
        raise self._refuse("computed with")

    __sub__ = __rsub__ = __rtruediv__ = __pow__ = __rpow__ = __matmul__ = __rmatmul__ = __neg__ = _refuse_operator
    __lt__ = __le__ = __gt__ = __ge__ = __bool__ = _refuse_operator
    __eq__ = __ne__ = _refuse_operator
    __hash__ = object.__hash__

    def tanh(self) -> DeferredLogits:
        if self.after is not None:
            raise self._refuse("given two softcaps")
        return dataclasses.replace(self, after=1.0)

    # The end: the loss, the logits after all, or a refusal

    def materialize(self) -> torch.Tensor:
        """Compute all logits after all, at their full cost."""
        logits = self.make_logits(self.hidden)
        logits = (logits if self.bias is None else logits + self.bias) * self.before
        return (logits if self.after is None else self.after * logits.tanh()).to(self.dtype)

    @classmethod
    def __torch_function__(
        cls, function: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        known: dict[Any, Callable[..., Any]] = {
            torch.tanh: cls.tanh,
            torch.add: cls.__add__,
            torch.mul: cls.__mul__,
            torch.div: cls.__truediv__,
            F.cross_entropy: cls._loss,
        }
        if function not in known or not args or not isinstance(args[0], cls):
            raise cls._refuse(f"passed to {getattr(function, '__name__', function)}")
        return known[function](*args, **(kwargs or {}))

    def _loss(
        self,
        target: torch.Tensor,
        weight: torch.Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: Any = 0.0,
    ) -> torch.Tensor:
        if weight is not None or size_average is not None or reduce is not None or target.is_floating_point():
            raise self._refuse("given to a cross entropy with class weights, soft targets or old arguments")
        if self.hidden.dim() > 2:  # noqa: PLR2004  (torch would take the second dimension for the classes)
            raise self._refuse("given to a cross entropy with classes in the second dimension")
        request = LossRequest(target, self.bias, self.before, self.after, ignore_index, reduction, label_smoothing)
        return self.make_loss(self.hidden, request)

    def __getattr__(self, name: str) -> Any:
        raise self._refuse(f"asked for {name!r}")

    @staticmethod
    def _refuse(what: str) -> LogitsNotComputedError:
        return LogitsNotComputedError(
            f"the policy tile(loss) is in force, so the logits were never computed, but they were {what}. "
            "Use outputs.loss; or outputs.logits.materialize() to compute all logits, at their full cost; or leave "
            "tile(loss) out of the policy"
        )
