"""Blocks and calls that do not run in tiles under `tile(attention)`: refused every time, or left alone and named."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import lowtide
from lowtide.errors import NotTokenWiseError, SilentNoOpError
from lowtide.tiling.key_values import KeyValueGrads
from models import attentive
from models.attentive import everything_in_double  # noqa: F401  (a fixture)
from models.tiny import IS_4, transformers
from support import ignore_dropped_caches
from support.foreign_warnings import ignore_warnings_of

pytestmark = [
    ignore_warnings_of("torch", "transformers"),
    ignore_dropped_caches,
    pytest.mark.skipif(IS_4, reason="transformers 4 hands out no eager attention, and some of these models are newer"),
]

STRICT = "recompute+tile(attention, tokens=12)"
LENIENT = "recompute+tile(attention, mlp, tokens=12)"


class Operators(TorchDispatchMode):
    """Notes the names of operators."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(str(func))
        return func(*args, **(kwargs or {}))


def blocks_of(applied):
    names = {region.name for region in applied.regions}
    return [tiles for tiles in applied.report().tiles if tiles.name in names]


# --- What a trial found, and what is one call's ----------------------------------------------------------------------


def test_a_refusal_is_raised_again_by_each_call():
    model, batch = attentive.make("llama"), attentive.batch("llama")
    model.model.layers[0].mlp.register_forward_hook(lambda _module, _args, out: out + out.mean(1, keepdim=True))
    with lowtide.apply(model, STRICT):
        for _ in range(3):
            with pytest.raises(NotTokenWiseError, match=r"model\.layers\.0 .* depends on the other tokens"):
                model(**batch)


def test_one_odd_call_does_not_end_tiling(everything_in_double):  # noqa: F811
    """A call that returns attention weights runs whole, as the first of its kind or between others."""
    model, batch = attentive.make("llama", "eager"), attentive.batch("llama")
    expected = attentive.step(model, batch)
    odd = batch | {"output_attentions": True}
    with lowtide.apply(model, LENIENT) as applied:
        for given in (odd, batch, odd, batch):
            before = [tiles.tiles for tiles in blocks_of(applied)]
            assert attentive.error(attentive.step(model, given), expected) <= 1e-12
            ran = [tiles.tiles - count for tiles, count in zip(blocks_of(applied), before, strict=True)]
            assert ran == ([2, 2] if given is odd else [4, 4]), "the recompute of a whole call is one, too"
        assert all((tiles.calls, tiles.left_alone_calls) == (6, 4) for tiles in blocks_of(applied))
        assert "(4 of 6 calls left alone: output_attentions asks for its attention weights" in str(applied.report())


def flash_stand_in(module, query, key, value, attention_mask, *, scaling=None, **_options):
    """Compute what a flash attention package does for one sequence: causal, aligned to the lower right."""
    rows, columns = query.shape[2], key.shape[2]
    mask = torch.ones(rows, columns, dtype=torch.bool).tril(columns - rows)
    out = nn.functional.scaled_dot_product_attention(query, key, value, mask, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2).contiguous(), None


@pytest.fixture
def flash_llama():
    interface, masks = transformers.AttentionInterface, transformers.AttentionMaskInterface
    interface.register("stand_in", flash_stand_in)
    masks.register("stand_in", lambda **_options: None)
    model = attentive.make("llama")
    model.set_attn_implementation("stand_in")
    yield model
    del interface._global_mapping["stand_in"], masks._global_mapping["stand_in"]


@pytest.mark.parametrize("first", ["odd", "usual"])
def test_positions_with_gaps_are_left_alone_in_their_call_only(first, flash_llama, everything_in_double):  # noqa: F811
    model, batch = flash_llama, attentive.batch("llama", rows=1)
    usual = batch | {"position_ids": torch.arange(23)[None]}
    odd = batch | {"position_ids": torch.cat([torch.arange(4), torch.arange(9, 28)])[None]}
    expected = {name: attentive.step(model, given) for name, given in (("odd", odd), ("usual", usual))}
    with lowtide.apply(model, LENIENT) as applied:
        for name in (first, "usual", "odd", "usual"):
            given = odd if name == "odd" else usual
            assert attentive.error(attentive.step(model, given), expected[name]) <= 1e-12
        odd_steps = 2 if first == "odd" else 1
        assert [tiles.left_alone_calls for tiles in blocks_of(applied)] == [2 * odd_steps] * 2
        assert [tiles.tiles for tiles in blocks_of(applied)] == [2 * odd_steps + 2 * (4 - odd_steps)] * 2
        assert all("position_ids" in tiles.left_alone for tiles in blocks_of(applied))


class CallsTwice:
    """Stands in for the forward of an attention that is sometimes called twice, which only its tiles can show."""

    def __init__(self, module):
        self._forward = module.forward
        self.is_odd = False

    def __call__(self, *args, **kwargs):
        if self.is_odd:
            self._forward(*args, **kwargs)
        return self._forward(*args, **kwargs)


@pytest.mark.parametrize("policy", ["tile(attention, mlp, tokens=12)", LENIENT])
def test_a_call_that_turns_out_odd_draws_as_if_it_had_begun_whole(policy, everything_in_double):  # noqa: F811
    """Its tiles have drawn by then: the whole call must not go on from there, nor its recompute from elsewhere."""
    model, batch = attentive.make("llama"), attentive.batch("llama", rows=1)
    layer = model.model.layers[1]
    layer.self_attn.forward = calls = CallsTwice(layer.self_attn)
    layer.mlp.down_proj = nn.Sequential(layer.mlp.down_proj, nn.Dropout(0.3))
    with lowtide.apply(model, policy) as applied:
        attentive.step(model, batch)
        calls.is_odd = True
        before = [(tiles.calls, tiles.tiles) for tiles in blocks_of(applied)]
        ours = attentive.step(model, batch)
        ran = [
            (tiles.calls - calls_before, tiles.tiles - tiles_before)
            for tiles, (calls_before, tiles_before) in zip(blocks_of(applied), before, strict=True)
        ]
        runs = 2 if "recompute" in policy else 1
        assert ran == [(1, 2), (runs, runs)]
        assert "it computes attention 2 times" in blocks_of(applied)[1].left_alone
    assert attentive.error(ours, attentive.step(model, batch)) <= 1e-12
    gc.collect()
    assert not [thing for thing in gc.get_objects() if type(thing) is KeyValueGrads], "nor is its graph kept"


# --- Blocks whose calls are of another kind --------------------------------------------------------------------------


def test_a_strict_policy_that_tiles_no_block_is_not_silent():
    """The vision blocks of Qwen3-VL have all images' patches in one dimension."""
    model, batch = attentive.make("qwen3_vl"), attentive.batch("qwen3_vl")
    with (
        lowtide.apply(model, STRICT, regions=["model.visual.blocks.*"]),
        pytest.raises(SilentNoOpError, match=r"visual\.blocks\.0.*its hidden states are not batch, tokens, features"),
    ):
        attentive.step(model, batch)
    with lowtide.apply(model, STRICT) as applied:
        attentive.step(model, batch)
        alone = {tiles.name for tiles in blocks_of(applied) if tiles.left_alone}
        assert alone == {region.name for region in applied.regions if "visual" in region.name}
    with lowtide.apply(model, STRICT.replace("12", "4096")):
        attentive.step(model, batch)  # too short to be cut is no fault


def test_a_long_call_that_needs_its_cache_says_so():
    model, batch = attentive.make("llama", dtype=torch.float32), attentive.batch("llama")
    model.eval()
    with lowtide.apply(model, STRICT) as applied:
        model.generate(batch["input_ids"], max_new_tokens=4, do_sample=False)
        found = {(tiles.calls, tiles.left_alone_calls, tiles.left_alone) for tiles in blocks_of(applied)}
        assert found == {(4, 1, "it needs its key-value cache")}
        model.train()
        attentive.step(model, batch)  # no reason for the guard to object


def test_kernels_that_the_user_switches_off_are_not_called(everything_in_double):  # noqa: F811
    model, batch = attentive.make("llama"), attentive.batch("llama")
    expected = attentive.step(model, batch)
    with lowtide.apply(model, "tile(attention, tokens=12)"):
        model.zero_grad()
        with Operators() as operators, torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            assert attentive.error(attentive.step(model, batch), expected) <= 1e-12
        assert not [name for name in operators.names if "flash" in name]


# --- Layers without attention that can be seen -----------------------------------------------------------------------


def jamba():
    config = transformers.JambaConfig(
        **attentive.GROUPED | {"num_hidden_layers": 4},
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=0,
        num_experts=2,
        use_mamba_kernels=False,
        mamba_d_state=4,
        mamba_d_conv=2,
        mamba_dt_rank=4,
        **attentive.TOKENS,
    )
    return transformers.JambaForCausalLM(config)


def qwen3_next():
    linear = {"linear_num_value_heads": 4, "linear_num_key_heads": 2}
    widths = {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
    config = transformers.Qwen3NextConfig(
        **attentive.GROUPED,
        head_dim=8,
        **linear,
        **widths,
        layer_types=["linear_attention", "full_attention"],
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
    )
    return transformers.Qwen3NextForCausalLM(config)


@pytest.mark.parametrize("policy", ["tile(attention, tokens=12)", LENIENT])
@pytest.mark.parametrize(
    ("make", "alone"),
    [(jamba, ["model.layers.0", "model.layers.2"]), (qwen3_next, ["model.layers.0"])],
    ids=["jamba", "qwen3_next"],
)
def test_layers_without_attention_are_left_alone_and_listed(make, alone, policy):
    """State-space mixers and linear attention: a strict policy is content with the layers that have attention."""
    torch.manual_seed(0)
    model, batch = make().double().train(), attentive.batch("llama")
    model.set_experts_implementation("eager")  # torch's grouped product knows no doubles
    expected = attentive.step(model, batch)
    with lowtide.apply(model, policy) as applied:
        assert {tiles.name for tiles in blocks_of(applied) if tiles.left_alone} == set(alone), "before anything runs"
        assert attentive.error(attentive.step(model, batch), expected) <= 1e-6
        report = applied.report()
        tiled = {tiles.name for tiles in blocks_of(applied) if tiles.tiles > tiles.calls}
        assert tiled == {region.name for region in applied.regions} - set(alone)
        lines = [line for line in str(report).splitlines() if "left alone: it asks transformers for no" in line]
        assert sum(name in "\n".join(lines) for name in alone) == 1 or len(lines) == len(alone)
        assert "left alone: it asks transformers for no attention function" in report.to_html()


SIZES = {
    "Falcon": {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32},
    "Bloom": {"n_layer": 2, "n_head": 4, "hidden_size": 32},
    "GPTJ": {"n_layer": 2, "n_head": 4, "n_embd": 32, "rotary_dim": 4},
}


@pytest.mark.parametrize("kind", SIZES)
def test_a_model_that_calls_torch_itself_is_listed(kind):
    config = getattr(transformers, f"{kind}Config")(**SIZES[kind], vocab_size=96)
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    with lowtide.apply(model, "recompute+tile(attention, mlp)") as applied:
        assert [tiles.name for tiles in blocks_of(applied)] == [f"transformer.h.{index}" for index in (0, 1)]
        assert "transformer.h.0-1 x2 [tile] left alone: it asks transformers for no attention" in str(applied.report())
