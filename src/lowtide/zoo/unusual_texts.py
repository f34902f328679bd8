"""Unusual batches of text, and of other sequences."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lowtide.zoo.parts import Fixed, Integers, Noise, Recipe, Same
from lowtide.zoo.scene import LENGTH, ROWS, Scene, first, ones, text

if TYPE_CHECKING:
    from collections.abc import Callable


def _decision_transformer(scene: Scene) -> Recipe:
    """Trajectories of states, actions and returns."""
    state, action = first(scene.config, "state_dim"), first(scene.config, "act_dim")
    return {
        "states": Noise((ROWS, LENGTH, state)),
        "actions": Noise((ROWS, LENGTH, action)),
        "rewards": Noise((ROWS, LENGTH, 1)),
        "returns_to_go": Noise((ROWS, LENGTH, 1)),
        "timesteps": Integers((ROWS, LENGTH), 64),
        "attention_mask": ones(ROWS, LENGTH),
    }


def _blt_local(scene: Scene) -> Recipe:
    """Bytes and the patches that they belong to, three bytes each."""
    width = first(scene.config, "hidden_size_global", "hidden_size")
    return {
        "input_ids": scene.tokens(),
        "inputs_embeds": Noise((ROWS, LENGTH, first(scene.config, "hidden_size"))),
        "patch_embeds": Noise((ROWS, LENGTH // 3, width)),
        "num_patches": Fixed(LENGTH // 3),
        "patch_ids": Fixed((torch.arange(LENGTH) // 3).repeat(ROWS, 1)),
    }


def _evolla(scene: Scene) -> Recipe:
    """The protein beside the text."""
    return text(scene) | {
        "protein_input_ids": Integers((ROWS, LENGTH), 20, low=4),
        "protein_attention_mask": ones(ROWS, LENGTH),
        "labels": Same("input_ids"),
    }


def _with_encoder(scene: Scene) -> Recipe:
    """A decoder that never goes without an encoder."""
    width = first(scene.config, "cross_attention_hidden_size", "hidden_size")
    return text(scene) | {"encoder_hidden_states": Noise((ROWS, LENGTH, width))}


BATCHES: dict[str, Callable[[Scene], Recipe]] = {
    "blt_local_decoder": _blt_local,
    "blt_local_encoder": _blt_local,
    "decision_transformer": _decision_transformer,
    "evolla": _evolla,
    "t5gemma2_decoder": _with_encoder,
}
