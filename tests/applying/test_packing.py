"""Several sequences packed into one, as transformers' and TRL's collators do it, under every mechanism.

Each attention learns in its own way where a sequence begins: torch's and the models' own by a mask that transformers
makes of position ids, flash attention packages by the bounds of sequences. The packages' function here is transformers'
own, around kernels that compute what a package computes.
"""

from __future__ import annotations

import tempfile

import pytest
import torch
import transformers
from torch import nn
from transformers import modeling_flash_attention_utils as flash_utilities
from transformers.integrations.flash_attention import flash_attention_forward

import lowtide
from lowtide.errors import NotTokenWiseError
from lowtide.tiling.packed_sequences import SeenSequences
from models import attentive
from models.attentive import everything_in_double  # noqa: F401
from models.quantized import SIZES

LENGTHS = (9, 1, 14, 6)
SAME_BITS = ["recompute", "recompute(keep=attention)", "recompute+offload(disk={folder}, tmpfs)"]
POLICIES = [
    *SAME_BITS,
    "recompute(keep=attention)+tile(mlp, tokens=7)",
    "recompute+offload(disk={folder}, tmpfs)+tile(attention, tokens=7)",
    "recompute+tile(mlp, tokens=7)",
    "recompute+tile(attention, tokens=7)",
    "recompute+tile(loss, loss_tokens=7)",
    "tile(attention, mlp, loss, tokens=7, loss_tokens=7)",
]


def features():
    torch.manual_seed(4)
    return [{"input_ids": torch.randint(1, 96, (length,)).tolist()} for length in LENGTHS]


def flattened(**more):
    found = transformers.DataCollatorWithFlattening(**more)(
        [each | {"labels": each["input_ids"]} for each in features()]
    )
    return dict(found)


def by_trl():
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    return dict(DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)(features()))


BATCHES = {
    "positions": flattened,
    "bounds": lambda: flattened(return_flash_attn_kwargs=True),
    "bounds and numbers": lambda: flattened(return_flash_attn_kwargs=True, return_seq_idx=True),
    "TRL": by_trl,
}


def kernel(query, key, value, *, softmax_scale=None, causal=False, window_size=(-1, -1), dropout_p=0.0):
    """Compute what `flash_attn_func` does: batch, tokens, heads, features; causal masks aligned to the lower right."""
    rows, columns = query.shape[1], key.shape[1]
    device = query.device
    distance = torch.arange(rows, device=device)[:, None] + columns - rows - torch.arange(columns, device=device)
    mask = torch.ones(rows, columns, dtype=torch.bool, device=device) if not causal else distance >= 0
    if window_size[0] >= 0:
        mask = mask & (distance <= window_size[0])
    query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
    out = nn.functional.scaled_dot_product_attention(query, key, value, mask, scale=softmax_scale, enable_gqa=True)
    return out.transpose(1, 2)


def kernel_of_sequences(q, k, v, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, **options):
    """Compute what `flash_attn_varlen_func` does: each sequence by itself."""
    at_q, at_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    assert (at_q[-1], at_k[-1]) == (len(q), len(k))
    assert max_seqlen_q >= cu_seqlens_q.diff().max()
    assert max_seqlen_k >= cu_seqlens_k.diff().max()
    parts = [
        kernel(q[a:b][None], k[c:d][None], v[c:d][None], **options)[0]
        for a, b, c, d in zip(at_q, at_q[1:], at_k, at_k[1:], strict=False)
    ]
    return torch.cat(parts)


@pytest.fixture
def flash(monkeypatch):
    """Let transformers' flash attention call the kernels above, under the name of an implementation."""
    for name, value in {
        "_loaded_implementation": "flash_stand_in",
        "_flash_fn": kernel,
        "_flash_varlen_fn": kernel_of_sequences,
        "_flash_with_kvcache_fn": None,
        "_pad_fn": None,
        "_unpad_fn": None,
        "_process_flash_kwargs_fn": flash_utilities._lazy_define_process_function(kernel_of_sequences),
        "_process_with_kvcache_kwargs_fn": dict,
    }.items():
        monkeypatch.setattr(flash_utilities, name, value, raising=False)
    transformers.AttentionInterface.register("flash_stand_in", flash_attention_forward)
    transformers.AttentionMaskInterface.register("flash_stand_in", lambda **_options: None)
    yield "flash_stand_in"
    del transformers.AttentionInterface._global_mapping["flash_stand_in"]
    del transformers.AttentionMaskInterface._global_mapping["flash_stand_in"]


def llama(attention, **more):
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES | more, use_cache=False)).double().train()
    model.set_attn_implementation(attention)
    return model


def check(model, batch, policies=POLICIES):
    expected = attentive.step(model, batch)
    positions = torch.arange(sum(LENGTHS))[None]
    bare = {"input_ids": batch["input_ids"], "labels": batch["labels"], "position_ids": positions}
    assert attentive.error(attentive.step(model, bare), expected) > 1e-3, "sequences are kept apart"
    for policy in policies:
        with (
            tempfile.TemporaryDirectory() as folder,
            lowtide.apply(model, policy.replace("{folder}", folder)) as applied,
        ):
            assert attentive.error(attentive.step(model, batch), expected) <= (0 if policy in SAME_BITS else 1e-12)
            report = applied.report()
            cut = [ledger for ledger in report.tiles if ledger.tiles > ledger.calls]
            assert bool(cut) == ("tile" in policy)
            assert not any(ledger.left_alone for ledger in report.tiles)
            assert all((region.recalled_outputs > 0) == ("keep" in policy) for region in report.regions)
            assert (report.regions[0].packed_bytes > 0) == ("disk" in policy)


@pytest.mark.parametrize(
    ("attention", "batch"), [("sdpa", "bounds and numbers"), ("sdpa", "TRL"), ("eager", "positions")]
)
def test_masks(attention, batch, everything_in_double):  # noqa: F811
    check(llama(attention), BATCHES[batch]())


@pytest.mark.parametrize("batch", ["positions", "bounds", "TRL"])
def test_a_flash_package(flash, batch, everything_in_double):  # noqa: F811
    check(llama(flash), BATCHES[batch]())


def test_a_flash_package_with_a_window(flash, everything_in_double):  # noqa: F811
    torch.manual_seed(0)
    config = transformers.MistralConfig(**SIZES, sliding_window=4, use_cache=False)
    model = transformers.MistralForCausalLM(config).double().train()
    model.set_attn_implementation(flash)
    check(model, BATCHES["bounds"](), ["recompute+tile(attention, tokens=7)"])


@pytest.mark.parametrize("tokens", [1, 2, 5, 29])
def test_tiles_of_any_size(flash, tokens, everything_in_double):  # noqa: F811
    check(llama(flash), BATCHES["TRL"](), [f"recompute+tile(attention, tokens={tokens})"])


@pytest.mark.parametrize("is_flash", [False, True], ids=["sdpa", "flash"])
def test_offload_on_the_emulated_device(is_flash, sim, flash):
    model = llama(flash if is_flash else "sdpa").float().to(sim)
    model.tie_weights()
    batch = {name: value.to(sim) if torch.is_tensor(value) else value for name, value in BATCHES["bounds"]().items()}
    expected = attentive.step(model, batch)
    for policy in ("recompute+offload", "recompute(keep=attention)+offload"):
        with lowtide.apply(model, policy) as applied:
            assert attentive.error(attentive.step(model, batch), expected) == 0
            assert applied.report().regions[0].packed_bytes > 0


def convolution(x, weight, bias=None, activation=None, seq_idx=None):
    """Compute what causal_conv1d's function does, sequence by sequence: without it, transformers refuses `seq_idx`."""
    size, length = weight.shape[-1], x.shape[-1]
    out = torch.zeros_like(x) if bias is None else bias[None, :, None].expand_as(x)
    for back in range(size):
        moved = nn.functional.pad(x, (back, 0))[..., :length]
        if seq_idx is not None:
            moved = moved * (nn.functional.pad(seq_idx, (back, 0), value=-1)[..., :length] == seq_idx)[:, None]
        out = out + moved * weight[:, size - 1 - back][None, :, None]
    return nn.functional.silu(out) if activation else out


def test_a_hybrid_model_that_reads_sequence_numbers(monkeypatch, everything_in_double):  # noqa: F811
    """Zamba's convolution keeps sequences apart by `seq_idx`. A block that has one is no block for tiles."""
    monkeypatch.setattr("transformers.models.zamba.modeling_zamba.causal_conv1d_fn", convolution)
    torch.manual_seed(0)
    config = transformers.ZambaConfig(
        **SIZES | {"num_key_value_heads": 4, "num_hidden_layers": 4}, attention_hidden_size=128, n_mamba_heads=2,
        mamba_d_state=8, mamba_dt_rank=4, layers_block_type=["mamba", "hybrid"] * 2, use_cache=False, pad_token_id=0,
    )  # fmt: skip
    model = transformers.ZambaForCausalLM(config).double().train()
    batch = flattened(return_seq_idx=True)
    expected = attentive.step(model, batch)
    without = attentive.step(model, {name: value for name, value in batch.items() if name != "seq_idx"})
    assert attentive.error(without, expected) > 1e-3, "it reads them"
    for policy in [
        "recompute",
        "recompute+tile(mlp, tokens=7)",
        "tile(attention, mlp, loss, tokens=7, loss_tokens=7)",
    ]:
        with lowtide.apply(model, policy):
            assert attentive.error(attentive.step(model, batch), expected) <= (0 if policy in SAME_BITS else 1e-12)
    refused(model, batch, r"its part 'mamba_decoder.mamba.conv1d' is a convolution over neighbouring tokens")


def attend(start, end, bounds, *, is_causal):
    """Say which pairs of a query and a key a tile sees, by what it is told."""
    seen = SeenSequences.of(bounds, start, end, is_causal=is_causal)
    pairs = set()
    for place in range(len(seen.queries_at) - 1):
        queries = range(seen.queries_at[place], seen.queries_at[place + 1])
        keys = range(seen.keys_at[place], seen.keys_at[place + 1])
        for query in queries:
            last = query - queries.stop + keys.stop if is_causal else keys.stop - 1
            pairs |= {(query + start, key + seen.keys.start) for key in keys if key <= last}
    assert seen.keys_at[-1] == seen.keys.stop - seen.keys.start
    return pairs


@pytest.mark.parametrize("is_causal", [True, False])
def test_every_tile_sees_the_keys_of_its_sequences(is_causal):
    bounds = [0, 3, 4, 9, 11]
    of = [place for place in range(4) for _ in range(bounds[place], bounds[place + 1])]
    for start in range(11):
        for end in range(start + 1, 12):
            expected = {
                (query, key)
                for query in range(start, end)
                for key in range(11)
                if of[query] == of[key] and (key <= query or not is_causal)
            }
            assert attend(start, end, bounds, is_causal=is_causal) == expected, (start, end)


def refused(model, batch, says):
    with lowtide.apply(model, "recompute+tile(attention, tokens=7)"), pytest.raises(NotTokenWiseError, match=says):
        model(**batch, use_cache=False)


def test_positions_that_are_not_those_of_packed_sequences_are_refused(flash):
    batch = BATCHES["positions"]()
    batch["position_ids"] = batch["position_ids"] + 1
    refused(llama(flash), batch, "position_ids that are not those of packed sequences")


def test_bounds_that_are_not_those_of_the_tokens_are_refused(flash):
    batch = BATCHES["bounds"]()
    batch["cu_seq_lens_k"] = batch["cu_seq_lens_k"].clone()
    batch["cu_seq_lens_k"][1] -= 1
    refused(llama(flash), batch, "are not the bounds of its tokens, for both alike")


def test_bounds_for_an_attention_that_nobody_knows_are_refused():
    def special(module, query, key, value, attention_mask, scaling=None, **_options):
        out = nn.functional.scaled_dot_product_attention(
            query, key, value, attention_mask, scale=scaling, enable_gqa=True
        )
        return out.transpose(1, 2).contiguous(), None

    transformers.AttentionInterface.register("special", special)
    transformers.AttentionMaskInterface.register("special", lambda **_options: None)
    try:
        refused(llama("special"), BATCHES["bounds"](), "it is not known how its attention function takes cu_seq_lens_q")
    finally:
        del transformers.AttentionInterface._global_mapping["special"]
        del transformers.AttentionMaskInterface._global_mapping["special"]
