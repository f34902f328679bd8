"""A sequence that is spread over ranks: DeepSpeed's Ulysses, and context parallelism. Each rank has a part of the loss.

Gradients, added up over the ranks, are those of one process with the whole sequence.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
from typing import TYPE_CHECKING
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.nn.functional import all_gather
from torch.nn import functional as F

import lowtide
from lowtide.errors import TransformError
from models import split
from support.deepspeed_on_sim import use_cpu
from support.foreign_warnings import ignore_warnings_of
from support.gathered_attention import gathered_attention
from support.joined import assert_joined, to_numpy
from support.launcher import run_ranks
from support.ring_attention import in_ring, ring_attention, without_masks

if TYPE_CHECKING:
    from collections.abc import Iterator

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


def shifted(given: dict) -> dict:
    """Return a batch whose labels are shifted before it is cut, for the next one may be another rank's."""
    labels = F.pad(given["labels"], (0, 1), value=-100)[:, 1:]
    positions = torch.arange(LENGTH).expand_as(labels)
    return {"input_ids": given["input_ids"], "position_ids": positions, "shift_labels": labels}


@contextlib.contextmanager
def part(given: dict) -> Iterator[dict]:
    """Have this rank's part of a batch: the first rank has its beginning."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    yield {name: value.chunk(ranks, 1)[rank].contiguous() for name, value in shifted(given).items()}


@contextlib.contextmanager
def part_in_ring(given: dict) -> Iterator[dict]:
    """Have this rank's part of a batch as torch's `context_parallel` cuts it."""
    with in_ring(shifted(given)) as own:
        yield own


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


def steps(directory: str, cut=part, make=split.make) -> list[dict]:
    """Return the gradients of each case (a policy, a loss, how many tokens have labels), added up over the ranks."""
    found = []
    for policy, loss, labelled in CASES:
        model, given = make(), batch(labelled=labelled)
        with lowtide.apply(model, policy.replace("disk", f"disk={directory}")) as applied, cut(given) as own:
            LOSSES[loss](model, own, given).backward()
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


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_context_parallel(ranks, tmp_path):
    check(run_ranks(in_context, str(tmp_path), ranks=ranks))


def backward_outside(rank: int, policy: str) -> None:
    model, given = split.make(), batch()
    with lowtide.apply(model, policy):
        with gathered_attention(), part(given) as own:
            loss = by_items(model, own, given)
        with pytest.raises(TransformError, match=r"'model\.layers\.1' ran while .*attend.*inside the same `with`"):
            loss.backward()


def test_a_backward_outside_of_the_context_is_refused():
    """Its recompute would attend to this rank's keys only: torch's own checkpoint says that tensors differ."""
    run_ranks(backward_outside, "recompute")


# --- Torch's own context parallelism ----------------------------------------------------------------------------------


def make_for_ring() -> torch.nn.Module:
    return without_masks(split.make())


def in_torchs_context(rank: int, directory: str) -> list[dict]:
    with ring_attention():
        return steps(directory, part_in_ring, make_for_ring)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_torchs_context_parallel(ranks, tmp_path):
    check(run_ranks(in_torchs_context, str(tmp_path), ranks=ranks))


def adapted() -> torch.nn.Module:
    """Return a model with adapters that have gradients, in a process's own copy."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    torch.manual_seed(1)
    return get_peft_model(split.make(), config).double()


IN_RING = [("recompute", True), ("recompute", False), ("recompute(keep=attention)", True)]
IN_RING += [("recompute+tile(mlp, tokens=7)", True)]


def adapters_in_ring(rank: int) -> list[dict]:
    """Return the gradients of adapters under FSDP2 for each policy, with and without torch's balance of the load."""
    found = []
    for policy, is_balanced in IN_RING:
        model, given = without_masks(adapted()), batch()
        lowtide.apply(model, policy)
        for unit in (*model.base_model.model.model.layers, model):
            fully_shard(unit)
        with ring_attention(is_balanced=is_balanced), in_ring(shifted(given)) as own:
            (by_items(model, own, given) * dist.get_world_size()).backward()  # FSDP2 leaves the ranks' mean
        found.append(to_numpy(model))
    return found


def test_adapters_under_fsdp2_in_torchs_context():
    """trl#4314: LoRA, FSDP2 and context parallelism together ended in torch's `CheckpointError`."""
    pytest.importorskip("peft")
    whole = adapted()
    whole(**batch(), use_cache=False).loss.backward()
    for per_policy in run_ranks(adapters_in_ring):
        assert_joined(per_policy, whole, tolerance=split.TOLERANCE)


def backward_outside_of_ring(rank: int) -> str:
    """Return how a backward behind torch's `with` is refused."""
    model, given = make_for_ring(), batch()
    lowtide.apply(model, "recompute")
    with ring_attention():
        with in_ring(shifted(given)) as own:
            loss = by_items(model, own, given)
        with pytest.raises(TransformError) as caught:
            loss.backward()
    return str(caught.value)


def test_a_backward_outside_of_torchs_context_is_refused():
    for text in run_ranks(backward_outside_of_ring):
        assert (
            "'model.layers.1' ran while torch.nn.functional.scaled_dot_product_attention was torch.distributed" in text
        )
        assert text.endswith("call .backward() inside the same `with` as forward")


# --- accelerate's ParallelismConfig -----------------------------------------------------------------------------------

RATE = 0.5


def with_accelerate(rank: int, policy: str, directory: str) -> dict:
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
    policy = policy.replace("disk", f"disk={directory}")
    engine, optimizer, loader = prepare(accelerator, policy, model, optimizer, loader)
    own = {name: value.contiguous() for name, value in next(iter(loader)).items()}
    accelerator.backward(by_weighted_means(engine, own, given))  # DeepSpeed adds up what a sequence's ranks have
    optimizer.step()
    check_report(policy, lowtide.apply(model, policy).report())  # the same handle again
    return {name: weight.detach().numpy() for name, weight in model.named_parameters()}


@needs_deepspeed
@pytest.mark.parametrize("policy", [POLICIES[-1], pytest.param("recompute+offload(disk)", marks=pytest.mark.slow)])
def test_accelerate(policy, tmp_path):
    whole = split.make().float()
    start = {name: weight.detach().clone() for name, weight in whole.named_parameters()}
    whole(**split.batch(length=LENGTH), use_cache=False).loss.backward()
    for weights in run_ranks(with_accelerate, policy, str(tmp_path), timeout=300):
        for name, weight in whole.named_parameters():
            step = RATE * weight.grad
            error = torch.from_numpy(weights[name]) - (start[name] - step)
            assert error.norm() <= 1e-3 * step.norm() + 1e-7, name


def in_accelerates_context(rank: int, policy: str, directory: str) -> dict:
    """Return the gradients of a step under FSDP2 that accelerate prepares with `cp_size`."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1", LOCAL_WORLD_SIZE="2")
    os.environ.update(ACCELERATE_USE_CPU="true", ACCELERATE_USE_FSDP="true", FSDP_VERSION="2")
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState
    from accelerate.utils import DistributedType, ParallelismConfig

    from lowtide.integrations.accelerate import prepare

    started = AcceleratorState.__init__

    def start(state: AcceleratorState, *args, fsdp_plugin=None, **kwargs) -> None:
        """Have FSDP on a CPU, too."""
        started(state, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None:
            state.distributed_type, state.fsdp_plugin = DistributedType.FSDP, fsdp_plugin

    layers = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["LlamaDecoderLayer"]}
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=False, **layers)
    with mock.patch.object(AcceleratorState, "__init__", start), ring_attention():
        accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(cp_size=2), fsdp_plugin=plugin)
        model, given = split.make(), batch()
        policy = policy.replace("disk", f"disk={directory}")
        model, _ = prepare(accelerator, policy, model, torch.optim.SGD(model.parameters(), lr=RATE))
        own = {name: value.clone() for name, value in shifted(given).items()}
        parts = [*own.values()]
        with accelerator.maybe_context_parallel(
            buffers=parts, buffer_seq_dims=[1] * len(parts), no_restore_buffers={*parts}
        ):
            accelerator.backward(by_items(model, own, given) * dist.get_world_size())
        check_report(policy, lowtide.apply(model, policy).report())
    return to_numpy(model)


@pytest.mark.parametrize("policy", [POLICIES[-1], pytest.param("recompute+offload(disk)", marks=pytest.mark.slow)])
def test_accelerate_with_context_parallelism(policy, tmp_path):
    whole = split.make()
    whole(**batch(), use_cache=False).loss.backward()
    assert_joined(run_ranks(in_accelerates_context, policy, str(tmp_path)), whole, tolerance=split.TOLERANCE)
