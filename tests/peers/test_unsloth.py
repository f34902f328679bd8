"""unsloth_zoo's three patches of torch's checkpoint function, and ours on top of each.

unslothai/unsloth#3713: whatever the caller asks for, they make a graph inside the graph, which DDP cannot follow. Their
offload begins at 2 MiB and wants a device that they know by name; so nothing here is moved by them, and every byte that
is counted is ours.
"""

from __future__ import annotations

import importlib
import os

import pytest
import torch

from support.beside_ours import (
    LAYERS,
    LEAVES,
    READY_TWICE,
    REENTRANT,
    ddp_gradients,
    enable_sim,
    joined_chain,
    moved_beyond,
    patched_chain,
    patched_llama,
    skip_without,
)
from support.joined import assert_joined
from support.launcher import RankFailedError, run_ranks, with_backend

skip_without("unsloth_zoo")

PATCHES = {
    "plain": "unsloth_gradient_checkpoint",
    "offloaded": "unsloth_offloaded_gradient_checkpoint",
    "smart": "unsloth_checkpoint",
}
"""By a word for each: the function that it puts in the place of torch's."""


def _zoo():
    # what it takes to import it without a GPU, and to set up its buffers there
    os.environ |= {"UNSLOTH_ZOO_DISABLE_GPU_INIT": "1", "UNSLOTH_DISABLE_DOUBLE_BUFFER": "1"}
    return importlib.import_module("unsloth_zoo.gradient_checkpointing")


def apply_plain() -> None:
    _zoo().patch_gradient_checkpointing()


def apply_offloaded() -> None:
    _zoo().patch_unsloth_gradient_checkpointing()


def apply_smart() -> None:
    _zoo().patch_unsloth_smart_gradient_checkpointing(torch.float32)


@with_backend(enable_sim)
def chain(rank, which, *args):
    return patched_chain(rank, f"{__name__}:apply_{which}", *args)


@with_backend(enable_sim)
def llama(rank, which, *args):
    return patched_llama(rank, f"{__name__}:apply_{which}", *args)


@with_backend(enable_sim)
def ddp(rank, which, *args):
    return ddp_gradients(rank, f"{__name__}:apply_{which}", *args)


@pytest.mark.parametrize("which", PATCHES)
@pytest.mark.parametrize("use_reentrant", REENTRANT)
def test_bytes_move_whatever_use_reentrant_says(which, use_reentrant):
    (seen,) = run_ranks(chain, which, REENTRANT[use_reentrant], ranks=1)
    assert seen.theirs.moved == (0, 0)
    assert seen.ours.moved == (LEAVES, LEAVES)
    assert seen.calls == LAYERS
    seen.ours.assert_same_gradients(seen.plain)


@pytest.mark.parametrize("which", PATCHES)
def test_theirs_is_named_and_back_afterwards(which):
    (seen,) = run_ranks(chain, which, {}, ranks=1)
    function = f"unsloth_zoo.gradient_checkpointing.{PATCHES[which]}"
    assert any(f"torch.utils.checkpoint.checkpoint was already replaced by {function}:" in said for said in seen.warned)
    names_function = any("CheckpointFunction was already replaced by unsloth_zoo" in said for said in seen.warned)
    assert names_function == (which == "smart"), "that one replaces both"
    assert {"torch.utils.checkpoint.checkpoint", "transformers.modeling_utils.checkpoint", function} <= set(seen.during)
    assert seen.changed == []


@pytest.mark.parametrize("which", PATCHES)
def test_transformers_with_its_defaults(which):
    (seen,) = run_ranks(llama, which, None, ranks=1)
    gained = (seen.ours.d2h - seen.plain.d2h, seen.ours.h2d - seen.plain.h2d)
    hidden = 2 * 64 * 64 * 4
    assert gained == ((LAYERS - 1) * hidden, (LAYERS - 1) * hidden)
    seen.ours.assert_same_gradients(seen.plain)


@pytest.mark.parametrize("which", PATCHES)
def test_ddp_with_unused_parameters(which):
    plain = run_ranks(ddp, which, "plain", {})
    for options in REENTRANT.values():
        with pytest.raises(RankFailedError, match=READY_TWICE):
            run_ranks(ddp, which, "theirs", options)
        ours = run_ranks(ddp, which, "lowtide", options)
        assert moved_beyond(ours, plain) == [(LEAVES, LEAVES), (LEAVES, LEAVES)]
        assert_joined([gradients for gradients, _ in ours], joined_chain(), tolerance=1e-12)
