"""Says which operators are dear: those whose outputs `recompute(keep=...)` keeps instead of computing them again.

`attention` stands for every fused attention that a block can call, told by the name of its operator, so that no package
has to be imported for it: torch's own kernels on all devices, `flash_attn` 2 and 3, xformers, kernels from the Hub. Of
attention that is written out (`softmax(q @ k) @ v`) it is the last product. `matmul` stands for matrix products. All
else is an operator's name, `aten.mm.default`, `aten.mm` or `mylib::op`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch

from lowtide._torch import schema_of
from lowtide.errors import InvalidValueError

if TYPE_CHECKING:
    from collections.abc import Iterable

ATTENTION, MATMUL = "attention", "matmul"

_FUSED_ATTENTION = re.compile(
    r"aten::_scaled_dot_product_\w*attention(_for_cpu|_overrideable|_math_for_mps)?"
    r"|aten::_(flash|efficient|cudnn)_attention_forward"
    r"|\w*flash_attn\w*::\w*(fwd|forward)\w*"
    r"|\w*(sage|flash)_?attention\w*::\w*(fwd|forward)\w*"
    r"|xformers\w*::(efficient_attention|flash)_(fwd|forward)\w*"
    r"|flex_attention"
)
"""The names of operators that compute attention in one go; not their backward, and not torch's mathematical form."""

_PRODUCTS = frozenset(
    {"mm", "addmm", "bmm", "baddbmm", "mv", "_scaled_mm", "_grouped_mm", "_scaled_grouped_mm", "_int_mm"}
)

_BATCHED_PRODUCTS = frozenset({"aten::bmm", "aten::baddbmm"})
_SCORES = frozenset({"aten::_softmax", "aten::_safe_softmax"})


def check_words(words: Iterable[str]) -> None:
    """Refuse an operator of torch's own that does not exist, or whose outputs cannot be kept."""
    for word in words:
        space, _, rest = word.replace("::", ".").partition(".")
        if space == "aten":
            packet, _, overload = rest.partition(".")
            _check_aten(word, packet, overload)


def _check_aten(word: str, packet: str, overload: str) -> None:
    found = getattr(torch.ops.aten, packet, None)
    if found is None or (overload and overload not in found.overloads()):
        raise InvalidValueError(f"keep: torch {torch.__version__} has no operator {word!r}")
    reasons = [_why_not_kept(getattr(found, name)) for name in ([overload] if overload else found.overloads())]
    if all(reasons):
        raise InvalidValueError(f"keep: {word!r} {reasons[0]}")


def _why_not_kept(operator: Any) -> str | None:
    """Return why the outputs of an operator cannot be kept, if so."""
    schema = schema_of(operator)
    if schema is None:
        return None
    if schema.is_mutable:
        return "writes to its arguments, and has to run again for that: keep an operator that computes something new"
    if any(value.alias_info is not None for value in schema.returns):
        return "returns a view of its arguments, which costs nothing: keep an operator that computes something new"
    return None


class KeptOperators:
    """The operators whose outputs are kept, by the words of a policy. It decides about each operator once."""

    def __init__(self, words: Iterable[str]) -> None:
        self.words = tuple(words)
        check_words(self.words)
        self._decisions: dict[Any, bool] = {}
        self._dropout: dict[Any, int | None] = {}

    def __contains__(self, operator: Any) -> bool:
        decision = self._decisions.get(operator)
        if decision is None:
            decision = self._decisions[operator] = self._decide(operator)
        return decision

    def _decide(self, operator: Any) -> bool:
        name = name_of(operator)
        space, _, packet = name.rpartition("::")
        schema = schema_of(operator)
        overload = "" if schema is None else schema.overload_name or "default"
        forms = {name, f"{space}.{packet}", f"{name}.{overload}", f"{space}.{packet}.{overload}"}
        is_named = any(word in forms for word in self.words)
        if is_named and (reason := _why_not_kept(operator)) is not None:
            if space == "aten":  # `aten.gelu` has a form that writes to a given output
                return False
            raise InvalidValueError(f"keep: {name} {reason}")
        is_attention = ATTENTION in self.words and _FUSED_ATTENTION.fullmatch(name) is not None
        return is_named or is_attention or (MATMUL in self.words and space == "aten" and packet in _PRODUCTS)

    def draws(self, operator: Any, args: tuple[Any, ...]) -> bool:
        """Return whether a call of an operator draws random numbers; attention does so only if it has dropout."""
        if operator not in self._dropout:
            self._dropout[operator] = _dropout_of(operator)
        index = self._dropout[operator]
        return index is not None and (index < 0 or (index < len(args) and bool(args[index])))

    @property
    def wants_written_out_attention(self) -> bool:
        """Whether the last product of attention that is written out is kept; with all products it is, anyway."""
        return ATTENTION in self.words and MATMUL not in self.words


def _dropout_of(operator: Any) -> int | None:
    """Return which argument of an operator is its dropout; -1 if it always draws random numbers, None if never."""
    if torch.Tag.nondeterministic_seeded not in getattr(operator, "tags", ()):
        return None
    schema = schema_of(operator)
    names = [] if schema is None else [argument.name for argument in schema.arguments]
    return names.index("dropout_p") if "dropout_p" in names else -1


def name_of(operator: Any) -> str:
    """Return an operator's name without its overload: `aten::mm`."""
    schema = schema_of(operator)
    return str(operator.name() if schema is None else schema.name)


def makes_scores(operator: Any) -> bool:
    """Return whether an operator is a softmax, as attention has one over its scores."""
    return name_of(operator) in _SCORES


def is_product(operator: Any) -> bool:
    """Return whether an operator is a product as attention has one of its scores and values."""
    return name_of(operator) in _BATCHED_PRODUCTS


def hides_changes(operator: Any) -> bool:
    """Return whether an operator's output shares memory with its input, but not the count of changes in place.

    Products of more than two dimensions end with such an operator.
    """
    return name_of(operator) == "aten::_unsafe_view"
