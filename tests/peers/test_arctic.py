"""ArcticTraining's CPU offload patches torch's `CheckpointFunction`, which non-reentrant checkpointing never calls.

snowflakedb/ArcticTraining#373: on transformers 5 it silently does nothing. The patch is the released one; it is run
from its own file, because the rest of that package wants an older transformers.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from support.beside_ours import (
    BOUNDARY,
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

skip_without("arctic_training")

APPLY = f"{__name__}:apply_it"
THEIRS = "arctic_training.monkey_patches.CheckpointFunctionWithCPUOffload"


def apply_it() -> None:
    package = importlib.util.find_spec("arctic_training")
    path = Path(package.submodule_search_locations[0], "monkey_patches.py")
    spec = importlib.util.spec_from_file_location("arctic_training.monkey_patches", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    module.monkey_patch_checkpoint_function_with_cpu_offload()


@with_backend(enable_sim)
def chain(rank, *args):
    return patched_chain(rank, APPLY, *args)


@with_backend(enable_sim)
def llama(rank, *args):
    return patched_llama(rank, APPLY, *args)


@with_backend(enable_sim)
def ddp(rank, *args):
    return ddp_gradients(rank, APPLY, *args)


@pytest.mark.parametrize("use_reentrant", REENTRANT)
def test_bytes_move_whatever_use_reentrant_says(use_reentrant):
    (seen,) = run_ranks(chain, REENTRANT[use_reentrant], ranks=1)
    all_inputs = 0 if use_reentrant == "False" else LAYERS * BOUNDARY
    assert seen.theirs.moved == (all_inputs, all_inputs), "the fault: non-reentrant moves nothing"
    assert seen.ours.moved == (LEAVES, LEAVES)
    assert seen.calls == LAYERS
    seen.ours.assert_same_gradients(seen.plain)


def test_theirs_is_named_and_back_afterwards():
    (seen,) = run_ranks(chain, {"use_reentrant": False}, ranks=1)
    (warning,) = seen.warned
    assert f"torch.utils.checkpoint.CheckpointFunction was already replaced by {THEIRS}" in warning
    assert "torch.utils.checkpoint.checkpoint" in seen.during
    assert "torch.utils.checkpoint.CheckpointFunction" not in seen.during
    assert seen.changed == []


def test_transformers_with_its_defaults():
    (seen,) = run_ranks(llama, None, ranks=1)
    hidden = 2 * 64 * 64 * 4
    assert seen.theirs.moved == seen.plain.moved, "the fault"
    gained = (seen.ours.d2h - seen.plain.d2h, seen.ours.h2d - seen.plain.h2d)
    assert gained == ((LAYERS - 1) * hidden, (LAYERS - 1) * hidden)
    seen.ours.assert_same_gradients(seen.plain)


@pytest.mark.parametrize("use_reentrant", REENTRANT)
def test_ddp_with_unused_parameters(use_reentrant):
    options = REENTRANT[use_reentrant]
    plain = run_ranks(ddp, "plain", options)
    if use_reentrant == "False":
        assert moved_beyond(run_ranks(ddp, "theirs", options), plain) == [(0, 0), (0, 0)], "the fault"
    else:
        with pytest.raises(RankFailedError, match=READY_TWICE):
            run_ranks(ddp, "theirs", options)
    ours = run_ranks(ddp, "lowtide", options)
    assert moved_beyond(ours, plain) == [(LEAVES, LEAVES), (LEAVES, LEAVES)]
    assert_joined([gradients for gradients, _ in ours], joined_chain(), tolerance=1e-12)
