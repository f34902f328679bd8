"""Looked at before a policy changes a model: a setting that could not act is refused, and nothing is changed."""

from __future__ import annotations

import fnmatch
import logging
import warnings
from typing import TYPE_CHECKING

import torch

from lowtide.errors import InvalidValueError, NoRegionError, OffloadError
from lowtide.losses.head_loss import count_classes
from lowtide.regions import find_head, find_mlps

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import nn

    from lowtide.policy import Policy
    from lowtide.regions import Region

logger = logging.getLogger(__name__)


def check_policy(model: nn.Module, policy: Policy, regions: list[Region]) -> None:
    """Whether all that the policy says can be done to these regions."""
    _check_rules(policy, regions)
    _check_device(model, policy, regions)
    _check_tiles(model, policy, regions)


def check_reach(model: nn.Module, others: Iterable[Region]) -> None:
    """A new policy takes the place of those in force. Of a larger model's it would leave nothing to the other parts."""
    inside = set(model.modules())
    outside = next((region.name for region in others if region.module not in inside), None)
    if outside is not None:
        raise InvalidValueError(
            f"{type(model).__name__} is a part of a model whose policy also acts on {outside!r}, outside of it: give "
            "the whole model one policy with a rule for this part ('recompute; visual.*: none'), or remove() that first"
        )


def tell_of_own_checkpointing(model: nn.Module, policy: Policy) -> None:
    """That it will be off while the policy is in force. Where warnings are errors, nothing has been changed yet."""
    if any(checkpoints_itself(module) for module in model.modules()):
        warnings.warn(
            f"lowtide: the model's own gradient checkpointing is switched off while the policy {policy.describe()} is "
            "in force",
            stacklevel=3,
        )


def checkpoints_itself(module: nn.Module) -> bool:
    """By transformers' flag."""
    return getattr(module, "gradient_checkpointing", False) is True


def keeps_less(policy: Policy, regions: list[Region]) -> bool:
    """Whether it recomputes or offloads anything; tiles alone leave what is kept to others."""
    chosen = [policy.for_region(region.name) for region in regions]
    return any(one.recompute or one.offload for one in chosen)


def offloads(policy: Policy, regions: list[Region]) -> bool:
    return any(policy.for_region(region.name).offload for region in regions)


def _check_rules(policy: Policy, regions: list[Region]) -> None:
    """A rule that fits nothing would silently do nothing, and so would one that recomputes a part of a block."""
    blocks = [region.name for region in regions]
    mlps = [name for _, name, _ in find_mlps(regions)]
    for pattern, rule in policy.overrides:
        if fnmatch.filter(blocks, pattern):
            continue
        if not fnmatch.filter(mlps, pattern):
            raise InvalidValueError(
                f"the rule {pattern!r} of policy {policy.describe()!r} fits no block and no MLP: they are called like "
                f"{blocks[0]!r}"
            )
        if rule.recompute or rule.offload:
            raise InvalidValueError(
                f"the rule {pattern!r} of policy {policy.describe()!r} fits MLPs alone, and only blocks, which are "
                f"called like {blocks[0]!r}, are recomputed or offloaded: use 'tile' or 'none' in it, or name other "
                "blocks with regions=[...]"
            )


def _check_tiles(model: nn.Module, policy: Policy, regions: list[Region]) -> None:
    """What should be tiled must be there."""
    if "loss" in policy.tile:
        count_classes(find_head(model).module)
    wanted = [region for region in regions if "mlp" in policy.for_region(region.name).tile]
    found = find_mlps(wanted)
    if found and (bare := sorted({region.name for region in wanted} - {region.name for region, _, _ in found})):
        # No warning: most vision-language models have a block or two like that, and the report names what is tiled.
        logger.info("tile(mlp): no MLP as a module of its own in %s: nothing is tiled there", ", ".join(bare))
    if wanted and not found:
        raise NoRegionError(
            f"tile(mlp): no block of {type(model).__name__} holds an MLP or a mixture of experts as a module of its "
            "own. Leave tile(mlp) out, or call lowtide.tile where the block makes its intermediates"
        )


def _check_device(model: nn.Module, policy: Policy, regions: list[Region]) -> None:
    """Host offload frees nothing if there is no accelerator to offload from. The model may still be moved to one."""
    if policy.offload == "disk" or not offloads(policy, regions) or torch.accelerator.is_available():
        return
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    if device.type == "cpu":
        raise OffloadError(
            f"policy {policy.describe()!r} offloads to the host, and {type(model).__name__} is on the CPU with no "
            "accelerator here: its activations are in host memory already. Use 'recompute', or the disk tier: "
            "'recompute+offload(disk=/a/directory)'"
        )
