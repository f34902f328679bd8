"""Validates a policy for a model: what cannot be done is refused here, before anything is changed.

A setting that could not act would silently do nothing, so each of them is looked at. What the checks find (regions,
MLPs, the head) is handed on as an `Installation`, so that nothing is looked for twice.
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
from typing import TYPE_CHECKING, NamedTuple, NoReturn

import torch

from lowtide.checkpointing.kept_operators import check_words
from lowtide.errors import InvalidValueError, NoRegionError, OffloadError
from lowtide.losses.head_loss import count_classes
from lowtide.modules import device_of
from lowtide.notices import warn
from lowtide.policy import Policy
from lowtide.policy.pattern import matches
from lowtide.regions import calls_attention, find_head, find_mlps, find_norms, find_regions
from lowtide.stores import store_for

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import nn

    from lowtide.regions import MLP, Head, Norm, Region, Selector
    from lowtide.stores import Store

logger = logging.getLogger(__name__)


class InstalledRegion(NamedTuple):
    """A region, and the policy that takes effect there."""

    region: Region
    policy: Policy


class TiledBlock(NamedTuple):
    """Pairs a region that runs in tiles as a whole, attention included, with the policy that gives their size."""

    region: Region
    policy: Policy


class TiledNorm(NamedTuple):
    """A norm behind a stack of tiled blocks, and their policy."""

    norm: Norm
    policy: Policy


class TiledMLP(NamedTuple):
    """Pairs an MLP or a mixture of experts that runs in tiles with the policy that gives their size."""

    mlp: MLP
    policy: Policy


@dataclasses.dataclass(frozen=True)
class Installation:
    """What a policy puts into a model: found and checked, with nothing changed yet."""

    policy: Policy
    regions: tuple[InstalledRegion, ...]
    """All regions, also those that the policy leaves alone."""
    mlps: tuple[TiledMLP, ...]
    blocks: tuple[TiledBlock, ...]
    left_alone: tuple[str, ...]
    """The regions that should run in tiles as a whole, and whose attention cannot be seen."""
    norms: tuple[TiledNorm, ...]
    """The norms behind stacks of tiled blocks."""
    head: Head | None
    """The head, if the loss is tiled."""
    store: Store | None = None
    """Where offloaded bytes wait; None if nothing is offloaded, and before `with_store`."""

    @property
    def offloads(self) -> bool:
        return _offload(self.regions)

    @property
    def keeps_less(self) -> bool:
        """Whether any region is recomputed or offloaded; tiles alone do not change what is kept."""
        return any(policy.recompute or policy.offload for _, policy in self.regions)

    def parts(self) -> list[tuple[str, nn.Module]]:
        """Return all modules that the policy acts on, with their names; a block that is tiled is a region, too."""
        found = [(region.name, region.module) for region, _ in self.regions]
        found += [(mlp.name, mlp.module) for mlp, _ in self.mlps] + [(norm.name, norm.module) for norm, _ in self.norms]
        return found if self.head is None else [*found, (self.head.name, self.head.module)]

    def with_store(self) -> Installation:
        """Return this installation with its store open, if it needs one. Raises `StoreError` if it cannot be had."""
        return dataclasses.replace(self, store=store_for(self.policy)) if self.offloads else self


def validate(model: nn.Module, policy: Policy, select: Sequence[Selector] | None = None) -> Installation:
    """Return what `policy` puts into `model`, or raise an error that names what cannot be done."""
    regions = find_regions(model, select)
    mlps = find_mlps(regions)
    _check_rules(policy, regions, mlps)
    for _, rule in (("", policy), *policy.overrides):
        check_words(rule.keep)
    installed = tuple(InstalledRegion(region, _effective_policy(policy, region)) for region in regions)
    _check_device(model, policy, installed)
    head = _head_to_tile(model, policy)
    blocks, left_alone = _blocks_to_tile(model, policy, regions)
    _check_mlps(model, policy, regions, mlps, blocks)
    policies = {block.region.name: block.policy for block in blocks}
    beside = find_norms(model, [block.region for block in blocks])
    norms = tuple(TiledNorm(norm, policies[region.name]) for norm, region in beside)
    return Installation(policy, installed, tuple(_mlps_to_tile(policy, mlps)), blocks, left_alone, norms, head)


def check_reach(model: nn.Module, regions: Iterable[Region]) -> None:
    """Refuse to replace a policy that also covers modules outside `model`: they would silently lose it.

    `regions` are those that the policies in force act on.
    """
    inside = set(model.modules())
    outside = next((region.name for region in regions if region.module not in inside), None)
    if outside is not None:
        raise InvalidValueError(
            f"{type(model).__name__} is part of a model whose policy also acts on {outside!r}, outside of it: give "
            "the whole model one policy with a rule for this part ('recompute; visual.*: none'), or remove() that "
            "policy first"
        )


def warn_about_own_checkpointing(model: nn.Module, policy: Policy) -> None:
    """Warn that the model's own checkpointing will be off. Where warnings are errors, nothing has been changed yet."""
    if any(checkpoints_itself(module) for module in model.modules()):
        warn(f"the model's own gradient checkpointing is switched off while the policy {policy.describe()} is in force")


def checkpoints_itself(module: nn.Module) -> bool:
    """Return whether transformers' flag for checkpointing is set on a module."""
    return getattr(module, "gradient_checkpointing", False) is True


def _offload(regions: Sequence[InstalledRegion]) -> bool:
    return any(policy.offload for _, policy in regions)


def _effective_policy(policy: Policy, region: Region) -> Policy:
    """Return the policy for a region: nothing at all if `every` passes over it."""
    chosen = policy.for_region(region.name)
    is_passed_over = chosen.recompute and region.index % chosen.every != 0
    return Policy() if is_passed_over else chosen


def _mlps_to_tile(policy: Policy, mlps: list[MLP]) -> Iterable[TiledMLP]:
    """Yield the MLPs that run in tiles. A rule may name an MLP itself, or the region that it is in."""
    for mlp in mlps:
        chosen = policy.for_region(mlp.region.name, mlp.name)
        if "mlp" in chosen.tile:
            yield TiledMLP(mlp, chosen)


UNSEEN_ATTENTION = "it asks transformers for no attention function (ALL_ATTENTION_FUNCTIONS), where it could be seen"
"""Why a region is left alone before it runs: a state-space mixer, linear attention, or a call of torch's own."""


def _blocks_to_tile(
    model: nn.Module, policy: Policy, regions: list[Region]
) -> tuple[tuple[TiledBlock, ...], tuple[str, ...]]:
    """Return the regions that run in tiles as a whole, and the names of those that should and cannot.

    Refuse `tile(attention)` where no region can.
    """
    wanted = [TiledBlock(region, policy.for_region(region.name)) for region in regions]
    wanted = [block for block in wanted if "attention" in block.policy.tile]
    found = tuple(block for block in wanted if calls_attention(block.region.module))
    strict = [block for block in wanted if not block.policy.tiles_what_it_can]
    if strict and not found:
        raise NoRegionError(
            f"tile(attention): no region of {type(model).__name__} asks transformers for its attention function "
            "(ALL_ATTENTION_FUNCTIONS), so its calls of attention cannot be seen. Leave tile(attention) out: "
            "'tile(mlp)' tiles its MLPs all the same"
        )
    return found, tuple(block.region.name for block in wanted if block not in found)


def _head_to_tile(model: nn.Module, policy: Policy) -> Head | None:
    if "loss" not in policy.tile:
        return None
    head = find_head(model)
    count_classes(head.module)  # refuses a head that does not tell how many
    _check_fused_head(head, policy)
    return head


_FUSED_HEAD = "fused_lm_head"
"""The keyword by which TRL's trainers ask the forward that they gave a model for log-probabilities without logits."""


def _check_fused_head(head: Head, policy: Policy) -> None:
    """Refuse `tile(loss)` for a model of a TRL trainer: its head is never called, so that tiles of it do nothing."""
    if _FUSED_HEAD in inspect.signature(head.model.forward, follow_wrapped=False).parameters:
        refuse_tiled_loss(
            policy,
            f"a TRL trainer has given {type(head.model).__name__} a forward that computes log-probabilities from the "
            f"weight of {head.name!r} in tiles of its own and never makes logits",
        )


def refuse_tiled_loss(policy: Policy, reason: str) -> NoReturn:
    """Refuse tile(loss) for a reason why no logits can be cut into tiles, and name the policy to use instead."""
    parts = tuple(part for part in policy.tile if part != "loss") or ("mlp",)
    instead = dataclasses.replace(policy, tile=parts, loss_tokens=None).describe()
    raise NoRegionError(
        f"tile(loss): {reason}, so there is nothing left to tile: use tile(mlp) without the loss, like {instead!r}"
    )


def _check_rules(policy: Policy, regions: list[Region], mlps: list[MLP]) -> None:
    """Refuse a rule that matches nothing, and one that would recompute or offload a part of a region."""
    region_names = [region.name for region in regions]
    mlp_names = [mlp.name for mlp in mlps]
    for pattern, rule in policy.overrides:
        if any(matches(pattern, name) for name in region_names):
            continue
        if not any(matches(pattern, name) for name in mlp_names):
            raise InvalidValueError(
                f"the rule {pattern!r} of policy {policy.describe()!r} matches no region and no MLP: regions have "
                f"names like {region_names[0]!r}"
            )
        if rule.recompute or rule.offload:
            raise InvalidValueError(
                f"the rule {pattern!r} of policy {policy.describe()!r} matches only MLPs, and only whole regions (with "
                f"names like {region_names[0]!r}) are recomputed or offloaded: use 'tile' or 'none' in this rule, or "
                "choose different regions with regions=[...]"
            )


def _check_device(model: nn.Module, policy: Policy, regions: Sequence[InstalledRegion]) -> None:
    """Refuse host offload where there is no accelerator to offload from; the model may still be moved to one."""
    if policy.offload == "disk" or not _offload(regions) or torch.accelerator.is_available():
        return
    if device_of(model).type == "cpu":
        raise OffloadError(
            f"policy {policy.describe()!r} offloads to the host, and {type(model).__name__} is on the CPU with no "
            "accelerator here: its activations are in host memory already. Use 'recompute', or the disk tier: "
            "'recompute+offload(disk=/a/directory)'"
        )


def _check_mlps(
    model: nn.Module, policy: Policy, regions: list[Region], mlps: list[MLP], blocks: tuple[TiledBlock, ...]
) -> None:
    """Refuse `tile(mlp)` where no region has an MLP to tile, or is tiled as a whole."""
    to_tile = {region.name for region in regions if "mlp" in policy.for_region(region.name).tile}
    with_mlp = {mlp.region.name for mlp in mlps} | {block.region.name for block in blocks}
    if to_tile and not to_tile & with_mlp:
        raise NoRegionError(
            f"tile(mlp): no region of {type(model).__name__} holds an MLP or a mixture of experts as a separate "
            "module. Leave tile(mlp) out, or call lowtide.tile where the model's code makes the intermediates"
        )
    if without_mlp := sorted(to_tile - with_mlp):
        # No warning: most vision-language models have a region or two like that, and the report names what is tiled.
        logger.info("tile(mlp): no MLP as a separate module in %s: nothing is tiled there", ", ".join(without_mlp))
