"""Ways to hold activations, each used as its documentation says: ours, torch's, and those of training frameworks.

A way is given a transformers model in training mode and returns the context that a step runs in. It may patch what it
likes: it runs in a process of its own.
"""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING

import torch
from torch.utils.checkpoint import create_selective_checkpoint_contexts

import lowtide
from bench import peers

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from transformers import PreTrainedModel

    Way = Callable[[PreTrainedModel], AbstractContextManager]

ATTENTION = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
)
"""Torch's fused attention, on all devices."""


def plain(model: PreTrainedModel) -> AbstractContextManager:
    del model
    return contextlib.nullcontext()


def ours(policy: str) -> Way:
    def way(model: PreTrainedModel) -> AbstractContextManager:
        lowtide.apply(model, policy)
        return contextlib.nullcontext()

    return way


def flag(*, reentrant: bool = False, offload: bool = False) -> Way:
    def way(model: PreTrainedModel) -> AbstractContextManager:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant}, offload=offload)
        return contextlib.nullcontext()

    return way


def selective(model: PreTrainedModel) -> AbstractContextManager:
    """Torch's selective checkpointing, with every fused attention of torch in its list."""
    operators = [getattr(torch.ops.aten, name).default for name in ATTENTION]
    context = functools.partial(create_selective_checkpoint_contexts, operators)
    model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": context})
    return contextlib.nullcontext()


def trl_selective(model: PreTrainedModel) -> AbstractContextManager:
    """As `SFTTrainer` does with `gradient_checkpointing_kwargs={"selective": True}`."""
    peers.load("trl.models").enable_selective_activation_checkpointing(model)
    model.gradient_checkpointing_enable()
    return contextlib.nullcontext()


def save_on_cpu(model: PreTrainedModel) -> AbstractContextManager:
    del model
    return torch.autograd.graph.save_on_cpu(pin_memory=True, device_type="sim")


def trl(model: PreTrainedModel) -> AbstractContextManager:
    peers.load("accelerate").PartialState(cpu=True)  # as in a trainer: its warnings go through accelerate
    return peers.load("trl.models.activation_offloading").get_act_offloading_ctx_manager(model)


def axolotl_hidden_states(model: PreTrainedModel) -> AbstractContextManager:
    flag()(model)
    module = peers.load("axolotl.monkeypatch.checkpoint_activation_offload")
    return module.get_checkpoint_hidden_states_offloading_ctx_manager()


def axolotl_legacy(model: PreTrainedModel) -> AbstractContextManager:
    flag()(model)
    wrapper = peers.load("axolotl.monkeypatch.gradient_checkpointing").hf_grad_checkpoint_offload_wrapper
    model._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=wrapper)
    return contextlib.nullcontext()


def arctic(*, reentrant: bool) -> Way:
    def way(model: PreTrainedModel) -> AbstractContextManager:
        peers.arctic().monkey_patch_checkpoint_function_with_cpu_offload()
        return flag(reentrant=reentrant)(model)

    return way


def unsloth(model: PreTrainedModel) -> AbstractContextManager:
    peers.load("unsloth_zoo.gradient_checkpointing").patch_unsloth_smart_gradient_checkpointing(torch.float32)
    return flag(reentrant=True)(model)


def unsloth_hooks(model: PreTrainedModel) -> AbstractContextManager:
    """Its hooks around each checkpoint, as its trainers set them for the non-reentrant kind."""
    hooks = peers.load("unsloth_zoo.gradient_checkpointing").non_reentrant_offload_hooks

    def checkpoint(function: Callable, *args: object) -> object:
        with hooks():
            return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False)

    flag()(model)
    model._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=checkpoint)
    return contextlib.nullcontext()


def both(first: Way, second: Way) -> Way:
    """One that sets the model up, and one that brings the context."""

    def way(model: PreTrainedModel) -> AbstractContextManager:
        first(model)
        return second(model)

    return way


WAYS: dict[str, Way] = {
    "plain": plain,
    "Lowtide recompute": ours("recompute"),
    "Lowtide recompute+offload": ours("recompute+offload"),
    "Lowtide offload": ours("offload"),
    "transformers' flag (torch checkpoint)": flag(),
    "transformers' flag, offload=True": flag(offload=True),
    "torch save_on_cpu": save_on_cpu,
    "transformers' flag + TRL offload": both(flag(), trl),
    "TRL offload": trl,
    "ArcticTraining offload": arctic(reentrant=False),
    "ArcticTraining offload, reentrant": arctic(reentrant=True),
    "unsloth_zoo non-reentrant hooks": unsloth_hooks,
    "unsloth_zoo smart checkpointing": unsloth,
    "axolotl hidden_states": axolotl_hidden_states,
    "axolotl legacy": axolotl_legacy,
}

SELECTIVE_WAYS: dict[str, Way] = {
    "plain": plain,
    "Lowtide recompute": ours("recompute"),
    "Lowtide recompute(keep=attention)": ours("recompute(keep=attention)"),
    "Lowtide recompute(keep=attention)+offload": ours("recompute(keep=attention)+offload"),
    "torch checkpoint": flag(),
    "torch selective checkpoint": selective,
    "TRL selective": trl_selective,
}
