"""`lowtide.apply`: applies a policy, or plans first and applies what fits a budget."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lowtide.applying import apply_policy
from lowtide.errors import DoesNotFitError, InvalidValueError
from lowtide.planning import plan
from lowtide.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import nn

    from lowtide.applying import Applied
    from lowtide.policy import Policy
    from lowtide.regions import Selector

DEFAULT_POLICY = "recompute+offload"


def apply(
    model: nn.Module,
    policy: Policy | str | Mapping[str, Any] | None = None,
    *,
    regions: Sequence[Selector] | None = None,
    strict: bool = True,
    budget: int | str | None = None,
    tokens: int | str | None = None,
    **job: Any,
) -> Applied:
    """Make `model` train under `policy`; the handle reports what happens and undoes it.

    Only instances of `model`'s regions change. Applying the same policy again returns the same handle; another policy
    takes the place of the first. `regions` names the regions (globs on module names, class names, classes); without it
    they are found. With `strict=False` a region that turns out to do nothing is a warning, not a `SilentNoOpError`.

    The default policy is `"recompute+offload"`. With `budget="24GiB"` and `tokens=131072` it is the policy that a plan
    recommends for that memory and length, the simplest within 5 % of the fastest; further keywords (`batch`,
    `batch_size`, `device`, `ranks`, `engine`, `optimizer`, ...) are passed to `lowtide.plan`. If nothing fits,
    `DoesNotFitError` says how much the least needs.
    """
    if budget is None:
        unused = [name for name, value in {"tokens": tokens, **job}.items() if value is not None]
        if unused:
            raise InvalidValueError(f"{', '.join(unused)}: these describe a plan, so they need budget=")
        chosen = DEFAULT_POLICY if policy is None else policy
        return apply_policy(model, chosen, regions=regions, strict=strict)
    if policy is not None:
        raise InvalidValueError("give a policy or a budget, not both: with budget= the plan chooses the policy")
    if regions is not None:
        raise InvalidValueError(
            "regions= and budget=: a plan finds the regions by itself. Call lowtide.plan first, then apply its policy"
        )
    if tokens is None and job.get("batch") is None:
        raise InvalidValueError("budget= needs tokens=, the length of the sequences that should fit, or batch=")
    found = plan(model, tokens=tokens, budget=budget, **job)
    if found.policy is None:
        raise DoesNotFitError(
            f"no policy fits {format_bytes(parse_bytes(budget))} with {found.job.size}: {found.why_nothing_fits}"
        )
    return apply_policy(model, found.policy, strict=strict)


apply.__module__ = "lowtide"
