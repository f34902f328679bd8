"""`tile(attention)`: what it does beside giving the right gradients, and what it refuses."""

from __future__ import annotations

import collections
import copy
import gc
import re

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import lowtide
from lowtide.errors import CacheError, InPlaceError, LowtideError, NoRegionError, NotTokenWiseError, SilentNoOpError
from lowtide.tiling.key_values import KeyValueGrads
from models import attentive
from models.attentive import everything_in_double  # noqa: F401  (a fixture)
from models.tiny import IS_4, transformers
from support import ignore_dropped_caches
from support.foreign_warnings import ignore_warnings_of

peft = pytest.importorskip("peft", reason="the hf extra is not installed")

pytestmark = [
    ignore_warnings_of("peft", "torch", "transformers"),
    ignore_dropped_caches,
    pytest.mark.skipif(IS_4, reason="transformers 4 hands out no eager attention, and some of these models are newer"),
]

POLICY = "recompute+tile(attention, tokens=12)"


def blocks_of(applied):
    names = {region.name for region in applied.regions}
    return [tiles for tiles in applied.report().tiles if tiles.name in names]


def llama(**more):
    return attentive.make("llama", **more), attentive.batch("llama")


def with_lora(model, **more):
    config = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, **more)
    return peft.get_peft_model(model, config, autocast_adapter_dtype=False).double().train()


class Operators(TorchDispatchMode):
    """Counts operators."""

    def __init__(self):
        super().__init__()
        self.counts = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func._overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


FORWARD, BACKWARD = (f"_scaled_dot_product_flash_attention_for_cpu{end}" for end in ("", "_backward"))


# --- Steps ----------------------------------------------------------------------------------------------------------


def test_two_forwards_before_two_backwards(everything_in_double):  # noqa: F811
    model, batch = llama()
    other = attentive.batch("llama", rows=1, length=31)
    losses = lambda: (model(**batch).loss, model(**other).loss)  # noqa: E731

    def gradients():
        model.zero_grad()
        one, two = losses()
        two.backward()
        one.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters()}

    expected = gradients()
    with lowtide.apply(model, POLICY):
        assert attentive.error(gradients(), expected) <= 1e-12
        assert attentive.error(gradients(), expected) <= 1e-12


@pytest.mark.parametrize("policy", ["tile(attention, tokens=12)", POLICY])
def test_a_backward_twice(policy, everything_in_double):  # noqa: F811
    model, batch = llama()
    expected = attentive.step(model, batch)
    with lowtide.apply(model, policy):
        loss = model(**batch).loss
        for retain in (True, False):
            model.zero_grad()
            loss.backward(retain_graph=retain)
            ours = {name: p.grad.clone() for name, p in model.named_parameters()}
            assert attentive.error(ours | {"loss": expected["loss"]}, expected) <= 1e-12


@pytest.mark.parametrize("policy", ["tile(attention, tokens=4)", "recompute+tile(attention, tokens=4)"])
@pytest.mark.parametrize("name", ["llama", "bert"])
def test_a_loss_of_a_few_tokens(policy, name, everything_in_double):  # noqa: F811
    model, batch = attentive.make(name), attentive.batch(name)
    batch["labels"][:, 3:] = -100
    batch["labels"][1] = -100
    expected = attentive.step(model, batch)
    with lowtide.apply(model, policy):
        assert attentive.error(attentive.step(model, batch), expected) <= 1e-12


def test_some_gradients_alone(everything_in_double):  # noqa: F811
    model, batch = llama()
    weights = [model.model.layers[0].self_attn.k_proj.weight, model.model.layers[1].mlp.up_proj.weight]
    expected = torch.autograd.grad(model(**batch).loss, weights)
    with lowtide.apply(model, POLICY):
        ours = torch.autograd.grad(model(**batch).loss, weights)
    for one, two in zip(ours, expected, strict=True):
        assert (one - two).norm() <= 1e-12 * two.norm()


def penalty_step(model, batch):
    """Return the gradients of a loss and of the squared gradient of its embeddings."""
    model.zero_grad()
    embeds = model.get_input_embeddings()(batch["input_ids"]).detach().requires_grad_()
    given = {name: value for name, value in batch.items() if name != "input_ids"}
    loss = model(inputs_embeds=embeds, **given).loss
    (slope,) = torch.autograd.grad(loss, embeds, create_graph=True)
    (loss + slope.square().sum()).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("policy", ["tile(attention, tokens=12)", POLICY])
def test_second_derivatives(policy, everything_in_double):  # noqa: F811
    model, batch = attentive.make("llama", "eager"), attentive.batch("llama", padded=True)
    expected = penalty_step(model, batch)
    with lowtide.apply(model, policy):
        assert attentive.error(penalty_step(model, batch), expected) <= 1e-12
        assert attentive.error(penalty_step(model, batch), expected) <= 1e-12


def test_a_second_derivative_that_a_kernel_has_not_is_refused():
    model, batch = llama()
    with lowtide.apply(model, POLICY), pytest.raises(LowtideError, match="has no second derivative"):
        penalty_step(model, batch)


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj"], ["v_proj"], ["up_proj"]])
def test_adapters_on_a_frozen_base(targets, everything_in_double):  # noqa: F811
    model, batch = llama()
    config = peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False)
    model = peft.get_peft_model(model, config, autocast_adapter_dtype=False).double().train()
    expected = attentive.step(model, batch)
    for policy in ("tile(attention, tokens=12)", POLICY):
        with lowtide.apply(model, policy):
            assert attentive.error(attentive.step(model, batch), expected) <= 1e-12


def test_packed_sequences(everything_in_double):  # noqa: F811
    """transformers makes a mask of positions that restart, and its rows are cut."""
    model, batch = attentive.make("llama"), attentive.batch("llama", rows=1)
    batch["position_ids"] = torch.cat([torch.arange(9), torch.arange(14)])[None]
    expected = attentive.step(model, batch)
    without = attentive.step(model, {name: value for name, value in batch.items() if name != "position_ids"})
    assert attentive.error(without, expected) > 1e-3
    with lowtide.apply(model, POLICY) as applied:
        assert attentive.error(attentive.step(model, batch), expected) <= 1e-12
        assert all(tiles.tiles > tiles.calls for tiles in blocks_of(applied))


def test_a_short_call_runs_whole():
    model, batch = llama()
    expected = attentive.step(model, batch)
    with lowtide.apply(model, "recompute+tile(attention, tokens=64)") as applied:
        assert attentive.error(attentive.step(model, batch), expected) == 0
        assert [(tiles.calls, tiles.tiles, tiles.left_alone) for tiles in blocks_of(applied)] == [(2, 2, "")] * 2
    with lowtide.apply(model, "recompute+tile(attention)") as applied:
        assert attentive.error(attentive.step(model, batch), expected) == 0
        assert [tiles.tiles for tiles in blocks_of(applied)] == [2, 2]


def test_evaluation_and_generation():
    model, batch = llama(dtype=torch.float32)
    model.eval()
    ids = batch["input_ids"]
    with torch.no_grad():
        expected, words = model(input_ids=ids).logits, model.generate(ids, max_new_tokens=4, do_sample=False)
    with lowtide.apply(model, POLICY) as applied, torch.no_grad():
        assert torch.allclose(model(input_ids=ids, use_cache=False).logits, expected, atol=1e-4)
        assert all(tiles.tiles == 4 for tiles in blocks_of(applied))
        assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False), words)
        model.train()  # as trainers generate between two steps: the cache counts there, too
        assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False), words)


def test_a_module_that_is_copied_removed_and_applied_again(everything_in_double):  # noqa: F811
    interface = transformers.modeling_utils.AttentionInterface
    before = vars(interface)["get_interface"]
    model, batch = llama()
    expected = attentive.step(model, batch)
    applied = lowtide.apply(model, POLICY)
    assert lowtide.apply(model, POLICY) is applied
    attentive.step(model, batch)
    assert attentive.error(attentive.step(copy.deepcopy(model), batch), expected) == 0, "a copy runs plainly"
    assert vars(interface)["get_interface"] is before, "transformers is as it was between tiles"
    applied.remove()
    assert not any("forward" in vars(module) for module in model.modules())
    assert attentive.error(attentive.step(model, batch), expected) == 0


def test_nothing_is_left_when_the_graph_is_dropped():
    model, batch = llama()
    with lowtide.apply(model, "tile(attention, tokens=12)"):
        model(**batch).loss.backward()
        gc.collect()
        gc.disable()
        try:
            loss = model(**batch).loss
            assert count_of(KeyValueGrads) == 2
            del loss
            assert count_of(KeyValueGrads) == 0, "the graph died with its last reference, not by garbage collection"
        finally:
            gc.enable()


def count_of(kind):
    return sum(type(thing) is kind for thing in gc.get_objects())


def test_a_weight_changed_in_between_is_refused():
    model, batch = llama()
    with lowtide.apply(model, "tile(attention, tokens=12)"):
        loss = model(**batch).loss
        with torch.no_grad():
            model.model.layers[0].mlp.up_proj.weight.mul_(2)
        with pytest.raises(InPlaceError):
            loss.backward()


# --- Counts ---------------------------------------------------------------------------------------------------------


def count_flops(model, batch):
    with FlopCounterMode(display=False) as counter:
        model(**batch).loss.backward()
    return counter.get_total_flops()


def test_attention_runs_as_often_as_recompute_runs_it():
    config = transformers.Qwen3Config(**attentive.GROUPED | {"hidden_size": 64, "intermediate_size": 192}, head_dim=16)
    model = transformers.Qwen3ForCausalLM._from_config(config, attn_implementation="sdpa").train()
    ids = torch.randint(0, 90, (1, 96))
    batch = {"input_ids": ids, "labels": ids}
    counts, flops = {}, {}
    for policy in ("recompute", "recompute+tile(attention, tokens=24)"):
        with lowtide.apply(model, policy):
            attentive.step(model, batch)
            with Operators() as operators:
                attentive.step(model, batch)
            counts[policy] = operators.counts
            flops[policy] = count_flops(model, batch)
    whole, tiled = counts.values()
    groups = 2  # a kernel's call for each head of keys
    pieces = 1 + 2 * 3  # the first tile sees its own keys, each other one also those before it
    assert whole[FORWARD] == 2 * 2
    assert tiled[FORWARD] == 2 * 2 * groups * pieces, "in forward, and once more in backward"
    assert tiled[BACKWARD] == 2 * groups * pieces
    token = 2 * 64 * (64 + 2 * 32) * 2  # q, k and v of a token in two layers; the counter knows no flash kernel
    extra = flops["recompute+tile(attention, tokens=24)"] - flops["recompute"]
    assert extra == (96 + 2) * token, "one more run of the projections, and one token's look in each direction"


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("offload", ["", "+offload(disk={})"])
def test_attention_that_is_kept_runs_once(offload, padded, tmp_path, everything_in_double):  # noqa: F811
    tmp_path.chmod(0o700)
    model, batch = attentive.make("llama"), attentive.batch("llama", padded=padded)
    expected = attentive.step(model, batch)
    policy = f"recompute(keep=attention){offload.format(tmp_path)}+tile(attention, tokens=12)"
    with lowtide.apply(model, policy) as applied:
        attentive.step(model, batch)
        with Operators() as operators:
            assert attentive.error(attentive.step(model, batch), expected) <= 1e-12
        assert operators.counts[FORWARD] == operators.counts[BACKWARD] > 0
        regions = applied.report().regions
        assert all(region.kept_outputs == region.recalled_outputs == 2 * 4 for region in regions), "4 tiles a step"
        assert (regions[0].packed_bytes > 0) == bool(offload)


@pytest.mark.parametrize("name", ["gemma3", "bert", "gpt2", "qwen3_vl"])
def test_attention_with_masks_and_windows_is_kept(name, everything_in_double):  # noqa: F811
    model, batch = attentive.make(name), attentive.batch(name, padded=True)
    expected = attentive.step(model, batch)
    with lowtide.apply(model, "recompute(keep=attention)+tile(attention, mlp, tokens=12)") as applied:
        for _ in range(2):
            assert attentive.error(attentive.step(model, batch), expected) <= 1e-12
        with Operators() as operators:
            attentive.step(model, batch)
        assert operators.counts[FORWARD] == operators.counts[BACKWARD] > 0
        tiled = {tiles.name for tiles in blocks_of(applied) if tiles.tiles > tiles.calls}
        kept = {region.name for region in applied.report().regions if region.recalled_outputs}
        assert kept >= tiled > set()


def test_an_mlp_is_not_cut_again_inside_a_tile():
    model, batch = llama()
    with lowtide.apply(model, "recompute+tile(attention, mlp, tokens=3)") as applied:
        attentive.step(model, batch)
        mlps = [tiles for tiles in applied.report().tiles if tiles.name.endswith("mlp")]
        assert len(mlps) == 2
        assert all(tiles.calls == 0 for tiles in mlps)


def test_the_norm_behind_the_blocks_runs_in_tiles():
    model, batch = llama()
    with lowtide.apply(model, POLICY) as applied:
        attentive.step(model, batch)
        (norm,) = [tiles for tiles in applied.report().tiles if tiles.name == "model.norm"]
        assert (norm.tiles, norm.recomputed_tiles) == (4, 4)


def test_a_sliding_window_reads_the_keys_in_it_alone():
    seen = []

    def spy(module, query, key, value, mask, **options):
        seen.append((module.is_sliding, query.shape[2], key.shape[2]))
        sdpa = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS["sdpa"]
        return sdpa(module, query, key, value, mask, **options)

    model, batch = attentive.make("gemma3"), attentive.batch("gemma3", rows=1, length=40)
    expected = attentive.step(model, batch)
    transformers.AttentionInterface.register("spy", spy)
    transformers.AttentionMaskInterface.register("spy", transformers.masking_utils.sdpa_mask)
    try:
        model.set_attn_implementation("spy")
        with lowtide.apply(model, "recompute+tile(attention, tokens=5)"):
            assert attentive.error(attentive.step(model, batch), expected) <= 1e-6
    finally:
        for interface in (transformers.AttentionInterface, transformers.AttentionMaskInterface):
            interface._global_mapping.pop("spy")
    keys = [count for is_sliding, queries, count in seen if is_sliding and queries == 5]
    assert len(keys) >= 2 * 8
    assert max(keys) == 8 + 5 - 1, "a window of eight for each of five queries"


# --- Randomness -----------------------------------------------------------------------------------------------------


def directional_error(model, batch):
    """Return the error of the gradients against central differences of the loss, whose seed is fixed."""
    weights = [weight for weight in model.parameters() if weight.requires_grad]

    def loss():
        torch.manual_seed(7)
        return model(**batch, use_cache=False).loss  # with a cache, a call without gradients runs whole

    loss()  # the trial draws nothing
    model.zero_grad()
    loss().backward()
    torch.manual_seed(5)
    directions = [torch.randn_like(weight) for weight in weights]
    pairs = list(zip(weights, directions, strict=True))
    ours = sum(float((weight.grad * direction).sum()) for weight, direction in pairs if weight.grad is not None)

    def moved(step):
        with torch.no_grad():
            for weight, direction in pairs:
                weight.add_(direction, alpha=step)
            value = float(loss())
            for weight, direction in pairs:
                weight.sub_(direction, alpha=step)
        return value

    step = 1e-6
    expected = (8 * (moved(step) - moved(-step)) - (moved(2 * step) - moved(-2 * step))) / (12 * step)
    return abs(expected - ours) / abs(expected)


@pytest.mark.parametrize("policy", ["none", "tile(attention, tokens=12)", POLICY])
@pytest.mark.parametrize("kind", ["adapters", "attention", "residual"])
def test_gradients_are_those_of_the_numbers_drawn(kind, policy, everything_in_double):  # noqa: F811
    model, batch = llama()
    if kind == "adapters":
        model = with_lora(model, lora_dropout=0.3)
    elif kind == "attention":
        for layer in model.model.layers:
            layer.self_attn.attention_dropout = 0.3
    else:
        for layer in model.model.layers:
            layer.mlp.down_proj = nn.Sequential(layer.mlp.down_proj, nn.Dropout(0.3))
    with lowtide.apply(model, policy) as applied:
        assert directional_error(model, batch) < 1e-5
        assert policy == "none" or all(tiles.tiles > tiles.calls for tiles in blocks_of(applied))


def test_both_passes_draw_the_same_numbers():
    model, batch = llama()
    model = with_lora(model, lora_dropout=0.5)
    dropout = model.base_model.model.model.layers[0].self_attn.k_proj.lora_dropout["default"]
    masks = []
    dropout.register_forward_hook(lambda _module, _args, out: masks.append((out != 0).detach().clone()))
    with lowtide.apply(model, POLICY):
        attentive.step(model, batch)
        masks.clear()
        model(**batch)
    masks = [mask for mask in masks if mask.shape[1] > 1]  # one token tells how attention is called
    assert len(masks) == 2 * 4
    first, second = masks[:4], masks[4:]
    assert all(torch.equal(one, two) for one, two in zip(first, second, strict=True))
    assert not torch.equal(first[0], first[1]), "each tile draws other ones"


# --- Precision ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["weights", "autocast"])
def test_bfloat16_is_as_exact_in_many_tiles_as_in_few(kind):
    exact_model, batch = attentive.make("qwen3"), attentive.batch("qwen3", rows=1, length=128)
    exact = attentive.step(exact_model, batch)
    model = attentive.make("qwen3", dtype=torch.bfloat16 if kind == "weights" else torch.float32)

    def error():
        with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
            ours = attentive.step(model, batch)
        of = [name for name in exact if name.endswith(("k_proj.weight", "v_proj.weight", "up_proj.weight"))]
        return sum(float((ours[n].double() - exact[n]).norm() / exact[n].norm()) for n in of) / len(of)

    plain = error()
    for shards in (2, 8, 32):
        with lowtide.apply(model, f"recompute+tile(attention, shards={shards})") as applied:
            assert error() <= 1.15 * plain, shards
            assert all(tiles.tiles == shards for tiles in blocks_of(applied))


# --- Refused, or left alone -----------------------------------------------------------------------------------------


def falcon():
    config = transformers.FalconConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, vocab_size=96)
    return transformers.FalconForCausalLM(config)


def t5():
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 96}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, decoder_start_token_id=0))


def test_a_model_that_calls_attention_unseen_is_refused():
    model = falcon()
    with pytest.raises(NoRegionError, match=r"tile\(attention\): no region of FalconForCausalLM asks transformers"):
        lowtide.apply(model, "tile(attention)")
    assert not any("forward" in vars(module) for module in model.modules())


def test_plain_tile_leaves_it_alone():
    model = falcon().train()
    ids = torch.randint(0, 90, (2, 24))
    with lowtide.apply(model, "recompute+tile(tokens=12)") as applied:
        model(input_ids=ids, labels=ids).loss.backward()
        assert [(tiles.calls, bool(tiles.left_alone)) for tiles in blocks_of(applied)] == [(0, True)] * 2
        mlps = [tiles for tiles in applied.report().tiles if tiles.name.endswith("mlp")]
        assert all(tiles.tiles == 4 for tiles in mlps)
        assert mlps


def test_a_shared_position_bias_is_refused_by_name_or_left_alone():
    model = t5().double().train()
    batch = attentive.batch("t5")
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    expected = attentive.step(model, batch)
    with (
        lowtide.apply(model, "tile(attention, tokens=12)"),
        pytest.raises(NotTokenWiseError, match=r"encoder.block.0 \(T5Block\) cannot run in tiles with its attention"),
    ):
        model(**batch)
    with lowtide.apply(model, "recompute+tile(attention, mlp, tokens=12)") as applied:
        assert attentive.error(attentive.step(model, batch), expected) <= 1e-6
        assert all(tiles.left_alone for tiles in blocks_of(applied))
        assert "left alone: " in str(applied.report())


def tensors_alive():
    return [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]


def test_a_block_that_is_left_alone_holds_nothing_of_its_trial():
    """The error that ended the trial has the trial's frames in its traceback, and they have its tensors."""
    model = t5().train()
    batch = attentive.batch("t5")
    width = next(model.parameters()).shape[1]
    others = tensors_alive()  # of this process's other tests; held, so that no new tensor has the identity of one
    with lowtide.apply(model, "recompute+tile(attention, mlp, tokens=12)") as applied:
        model(**batch).loss.backward()
        model.zero_grad()
        gc.collect()
        known = {id(tensor) for tensor in (*model.parameters(), *model.buffers(), *batch.values(), *others)}
        held = [each for each in tensors_alive() if id(each) not in known]
        assert not [tuple(each.shape) for each in held if each.dim() == 3 and each.shape[-1] == width]
        assert all(tiles.left_alone for tiles in blocks_of(applied))


def test_attention_weights_are_refused():
    model, batch = llama(attention="eager")
    with lowtide.apply(model, POLICY), pytest.raises(NotTokenWiseError, match="output_attentions"):
        model(**batch, output_attentions=True)


def test_a_cache_with_content_is_refused():
    model, batch = llama()
    cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        model.eval()(input_ids=batch["input_ids"], past_key_values=cache)
    model.train()
    with lowtide.apply(model, "tile(attention, tokens=12)"), pytest.raises(CacheError, match="with content"):
        model(**batch, past_key_values=cache)


def test_a_mask_of_blocks_is_refused():
    model, batch = llama(attention="flex_attention", dtype=torch.float32)
    with lowtide.apply(model, POLICY), pytest.raises(NotTokenWiseError, match="its mask is a BlockMask"):
        model(**batch)


def flash_stand_in(module, query, key, value, attention_mask, *, scaling=None, **_options):
    """Compute what a flash attention package does: causal, aligned to the lower right."""
    rows, columns = query.shape[2], key.shape[2]
    mask = torch.ones(rows, columns, dtype=torch.bool).tril(columns - rows)
    assert attention_mask is None
    out = nn.functional.scaled_dot_product_attention(query, key, value, mask, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2).contiguous(), None


@pytest.fixture
def flash_llama():
    interface, masks = transformers.AttentionInterface, transformers.AttentionMaskInterface
    interface.register("stand_in", flash_stand_in)
    masks.register("stand_in", lambda **_options: None)
    model, batch = llama()
    model.set_attn_implementation("stand_in")
    yield model, batch
    del interface._global_mapping["stand_in"], masks._global_mapping["stand_in"]


def test_a_flash_package_gets_the_keys_up_to_the_end_of_a_tile(flash_llama, everything_in_double):  # noqa: F811
    model, batch = flash_llama
    expected = attentive.step(model, batch)
    with lowtide.apply(model, POLICY) as applied:
        assert attentive.error(attentive.step(model, batch), expected) <= 1e-12
        assert all(tiles.tiles > 1 for tiles in blocks_of(applied))


class LooksAround(nn.Module):
    """Adds the mean of all tokens, times a little."""

    def __init__(self, size):
        super().__init__()
        self.size = size

    def forward(self, x):
        return x + self.size * x.mean(1, keepdim=True)


@pytest.mark.parametrize("size", [1.0, 1e-3])
def test_a_block_that_mixes_tokens_beside_its_attention_is_refused(size):
    model, batch = llama(dtype=torch.float32)
    model.model.layers[1].mlp = nn.Sequential(model.model.layers[1].mlp, LooksAround(size))
    with (
        lowtide.apply(model, POLICY),
        pytest.raises(NotTokenWiseError, match=r"model\.layers\.1 .* depends on the other tokens"),
    ):
        model(**batch)


def test_a_convolution_in_a_block_is_refused():
    model, batch = llama()
    layer = model.model.layers[0]
    layer.mlp.register_module("mixer", nn.Conv1d(4, 4, 3).double())
    with (
        lowtide.apply(model, POLICY),
        pytest.raises(NotTokenWiseError, match=re.escape("'mlp.mixer' is a convolution")),
    ):
        model(**batch)


def test_a_hook_that_looks_at_other_tokens_is_refused():
    model, batch = llama()
    model.model.layers[0].mlp.register_forward_hook(lambda _module, _args, out: out + out.mean(1, keepdim=True))
    with lowtide.apply(model, POLICY), pytest.raises(NotTokenWiseError, match="depends on the other tokens"):
        model(**batch)


def test_a_buffer_that_each_call_updates_is_refused():
    model, batch = llama()
    norm = model.model.layers[0].input_layernorm
    norm.register_buffer("calls", torch.zeros(()).double())
    norm.register_forward_pre_hook(lambda module, _args: module.calls.add_(1) and None)
    with lowtide.apply(model, POLICY), pytest.raises(NotTokenWiseError, match=r"buffer .input_layernorm\.calls."):
        model(**batch)


def test_attention_that_is_kept_nowhere_is_not_silent():
    """Eager attention is the model's own function in tiles, too, and what it computes there is not kept."""
    model, batch = llama(attention="eager")
    policy = "recompute(keep=attention)+tile(attention, tokens=12)"
    with lowtide.apply(model, policy), pytest.raises(SilentNoOpError, match="keep"):
        attentive.step(model, batch)


def test_attention_that_later_batches_do_not_keep_is_not_silent():
    model, batch = llama()
    with lowtide.apply(model, "recompute(keep=attention)+tile(attention, tokens=12)"):
        attentive.step(model, batch)
        for layer in model.model.layers:
            layer.self_attn.attention_dropout = 0.1
        with pytest.warns(UserWarning, match=r"keeps nothing in calls .*first seen in model\.layers\.0"):
            attentive.step(model, batch)
        attentive.step(model, batch)  # once is enough
