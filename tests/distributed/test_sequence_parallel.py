"""A sequence that is spread over ranks: DeepSpeed's Ulysses, and context parallelism. Each rank has a part of the loss.

Gradients, added up over the ranks, are those of one process with the whole sequence.
"""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.nn.functional import all_gather
from torch.distributed.tensor.experimental import context_parallel
from torch.nn import functional as F

import lowtide
from lowtide.errors import TransformError
from models import split
from support.deepspeed_on_sim import use_cpu
from support.foreign_warnings import ignore_warnings_of
from support.gathered_attention import gathered_attention
from support.joined import assert_joined, to_numpy
from support.launcher import run_ranks

pytestmark = [ignore_warnings_of("deepspeed", "torch", "transformers"), pytest.mark.timeout(600)]

needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="the deepspeed extra is not installed"
)

POLICIES = [
    "recompute",
    "recompute(keep=attention)",
    "recompute+offload(disk)",
    "recompute+tile(mlp, tokens=7)",
    "recompute+tile(loss, loss_tokens=5)",
    "recompute+tile(tokens=7, loss_tokens=5)",
]
LENGTH = 48


def batch(*, labelled: int = LENGTH) -> dict:
    """Return a batch whose loss is that of the first `labelled` tokens."""
    given = split.batch(length=LENGTH)
    given["labels"] = given["labels"].clone()
    given["labels"][:, labelled:] = -100
    return given


def part(given: dict) -> dict:
    """Return this rank's part of a batch. Labels are shifted before they are cut, for the next one may be elsewhere."""
    shifted = F.pad(given["labels"], (0, 1), value=-100)[:, 1:]
    positions = torch.arange(LENGTH).expand_as(shifted)
    whole = {"input_ids": given["input_ids"], "position_ids": positions, "shift_labels": shifted}
    ranks, rank = dist.get_world_size(), dist.get_rank()
    return {name: value.chunk(ranks, 1)[rank].contiguous() for name, value in whole.items()}


# --- Three ways to make a loss of the ranks' parts --------------------------------------------------------------------


def by_items(model, own: dict, given: dict) -> torch.Tensor:
    """Return a sum over this rank's tokens, divided by those of all ranks: `num_items_in_batch`."""
    items = (given["labels"][:, 1:] != -100).sum()
    return model(**own, labels=own["shift_labels"], num_items_in_batch=items, use_cache=False).loss


def by_weighted_means(model, own: dict, given: dict) -> torch.Tensor:
    """Return the ranks' means, weighted, as transformers' Trainer adds them up. A rank without labels has none."""
    loss = model(**own, labels=own["shift_labels"], use_cache=False).loss
    counts = torch.stack(all_gather((own["shift_labels"] != -100).sum()))
    losses = torch.stack(all_gather(loss))
    total = torch.where(counts > 0, losses, torch.zeros_like(losses)) * counts
    return total.sum() / counts.sum() / dist.get_world_size()  # its backward adds up what all ranks made of it


def outside(model, own: dict, given: dict) -> torch.Tensor:
    """Return the loss that is made outside of the model, of logits, with shifted labels only."""
    logits = model(**own, use_cache=False).logits
    items = (given["labels"][:, 1:] != -100).sum()
    vocabulary = model.config.vocab_size
    shifted = own["shift_labels"]
    return model.loss_function(
        logits=logits, labels=None, shift_labels=shifted, vocab_size=vocabulary, num_items_in_batch=items
    )


LOSSES = {"by items": by_items, "by weighted means": by_weighted_means, "outside": outside}


def check_report(policy: str, report) -> None:
    assert all(region.recomputes == region.forwards > 0 for region in report.regions)
    tiles = {tiled.name: tiled for tiled in report.tiles}
    if "tile" in policy:
        cut = {name for name, tiled in tiles.items() if tiled.tiles > tiled.calls}
        mlps = {name for name in tiles if name.endswith("mlp")}
        assert cut >= (mlps if "mlp" in policy else {"lm_head"}), tiles
    if "tile(tokens" in policy:
        blocks = [tiled for name, tiled in tiles.items() if name.endswith((".0", ".1"))]
        assert [bool(tiled.left_alone) for tiled in blocks] == [True, True]
        assert cut == {*mlps, "lm_head", "model.norm"}
    if "offload" in policy:
        assert report.regions[0].restored_bytes > 0  # the last one stays


def steps(directory: str) -> list[dict]:
    """Return the gradients of each case (a policy, a loss, how many tokens have labels), added up over the ranks."""
    found = []
    for policy, loss, labelled in CASES:
        model, given = split.make(), batch(labelled=labelled)
        with lowtide.apply(model, policy.replace("disk", f"disk={directory}")) as applied:
            LOSSES[loss](model, part(given), given).backward()
            if "by" in loss or "loss" not in policy:
                check_report(policy, applied.report())
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        found.append(to_numpy(model))
    return found


def check(per_rank: list[list[dict]]) -> None:
    for index, (_, _, labelled) in enumerate(CASES):
        whole = split.make()
        whole(**batch(labelled=labelled), use_cache=False).loss.backward()
        assert_joined([found[index] for found in per_rank], whole, tolerance=split.TOLERANCE)


ALL = LENGTH
HALF = LENGTH // 2  # the last rank has no labels at all
CASES = [
    *((policy, "by items", ALL) for policy in POLICIES),
    *((policy, loss, HALF) for policy in ("recompute", POLICIES[-1]) for loss in LOSSES),
    (POLICIES[-1], "by weighted means", ALL - 7),
]


# --- DeepSpeed's Ulysses ----------------------------------------------------------------------------------------------


def under_ulysses(rank: int, directory: str) -> list[dict]:
    use_cpu()
    import deepspeed
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    deepspeed.init_distributed("gloo")
    UlyssesSPAttentionHF.register_with_transformers(
        model_name_or_path=split.make(),
        core_attn_implementation="sdpa",
        sequence_parallel_size=dist.get_world_size(),
        micro_batch_size=2,
    )
    return steps(directory)


@needs_deepspeed
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ulysses(ranks, tmp_path):
    check(run_ranks(under_ulysses, str(tmp_path), ranks=ranks, timeout=300))


# --- Context parallelism ----------------------------------------------------------------------------------------------


def in_context(rank: int, directory: str) -> list[dict]:
    with gathered_attention():
        return steps(directory)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_context_parallel(ranks, tmp_path):
    check(run_ranks(in_context, str(tmp_path), ranks=ranks))


def backward_outside(rank: int, policy: str) -> None:
    model, given = split.make(), batch()
    with lowtide.apply(model, policy):
        with gathered_attention():
            loss = by_items(model, part(given), given)
        with pytest.raises(TransformError, match=r"'model\.layers\.1' ran while .*attend.*inside the same `with`"):
            loss.backward()


def test_a_backward_outside_of_the_context_is_refused():
    """Its recompute would attend to this rank's keys only: torch's own checkpoint says that tensors differ."""
    run_ranks(backward_outside, "recompute")


def plain_in_torchs_context(rank: int) -> str:
    mesh = init_device_mesh("cpu", (2,))
    model, ids = split.make(), split.batch(length=LENGTH)["input_ids"]
    positions = torch.arange(LENGTH).expand_as(ids).contiguous()
    with context_parallel(mesh, buffers=[ids, positions], buffer_seq_dims=[1, 1]):
        try:
            model(input_ids=ids, position_ids=positions, use_cache=False).logits.sum().backward()
        except (RuntimeError, NotImplementedError, AttributeError) as error:
            return str(error)
    return "runs"


def test_torchs_own_context_parallelism_does_not_run_on_a_cpu_even_plain():
    """If it ever does, it belongs into the tests above."""
    assert "runs" not in run_ranks(plain_in_torchs_context)


# --- accelerate's ParallelismConfig -----------------------------------------------------------------------------------

RATE = 0.5


def with_accelerate(rank: int, policy: str) -> dict:
    """Return the weights after a step of DeepSpeed's engine, on sequences that accelerate's loader spreads."""
    use_cpu()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1", LOCAL_WORLD_SIZE="2", ACCELERATE_USE_DEEPSPEED="true")
    from accelerate import Accelerator, DeepSpeedPlugin
    from accelerate.utils import DeepSpeedSequenceParallelConfig, ParallelismConfig

    from lowtide.integrations.accelerate import prepare

    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2}, "gradient_clipping": 0.0}
    config |= {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
    given, positions = split.batch(length=LENGTH), torch.arange(LENGTH)
    rows = [{"input_ids": ids, "labels": ids, "position_ids": positions} for ids in given["input_ids"].repeat(2, 1)]
    handler = DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=True, sp_attn_implementation="sdpa")
    parallelism = ParallelismConfig(sp_size=2, sp_handler=handler)
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config), parallelism_config=parallelism)
    model = split.make().float()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    loader = torch.utils.data.DataLoader(rows, batch_size=2)
    engine, optimizer, loader = prepare(accelerator, policy, model, optimizer, loader)
    own = {name: value.contiguous() for name, value in next(iter(loader)).items()}
    accelerator.backward(by_weighted_means(engine, own, given))  # DeepSpeed adds up what a sequence's ranks have
    optimizer.step()
    check_report(policy, lowtide.apply(model, policy).report())  # the same handle again
    return {name: weight.detach().numpy() for name, weight in model.named_parameters()}


@needs_deepspeed
def test_accelerate():
    whole = split.make().float()
    start = {name: weight.detach().clone() for name, weight in whole.named_parameters()}
    whole(**split.batch(length=LENGTH), use_cache=False).loss.backward()
    for weights in run_ranks(with_accelerate, POLICIES[-1], timeout=300):
        for name, weight in whole.named_parameters():
            step = RATE * weight.grad
            error = torch.from_numpy(weights[name]) - (start[name] - step)
            assert error.norm() <= 1e-3 * step.norm() + 1e-7, name
