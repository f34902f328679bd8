"""Tiny transformers models of many kinds of attention, without dropout, computing in double precision throughout.

Models compute norms, softmax and losses in float32 whatever they are in. `everything_in_double` makes that double, too,
so that tiles can be held against the whole to the last digits.
"""

from __future__ import annotations

import importlib

import pytest
import torch
from torch import nn

from models.tiny import qwen3_vl, transformers

WIDTHS = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
GROUPED = WIDTHS | {"num_key_value_heads": 2}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
WINDOWED = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
SEQ2SEQ = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "vocab_size": 96,
    "dropout": 0.0,
}


def _deepseek():
    return transformers.DeepseekV3Config(
        **GROUPED | {"num_key_value_heads": 4},
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=12,
        first_k_dense_replace=1,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        moe_intermediate_size=16,
    )


def _gpt_oss():
    return transformers.GptOssConfig(**GROUPED, head_dim=8, num_local_experts=4, **WINDOWED)


def _gemma3():
    return transformers.Gemma3TextConfig(**GROUPED, head_dim=16, query_pre_attn_scalar=16, **WINDOWED, **TOKENS)


def _modernbert():
    return transformers.ModernBertConfig(
        **WIDTHS, local_attention=8, global_attn_every_n_layers=2, cls_token_id=1, sep_token_id=2, **TOKENS
    )


def _gpt2():
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 96, "n_positions": 128}
    return transformers.GPT2Config(**sizes, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0)


def _whisper():
    sizes = {"num_mel_bins": 8, "max_source_positions": 40, "max_target_positions": 64}
    return transformers.WhisperConfig(**SEQ2SEQ, **sizes, **TOKENS, decoder_start_token_id=1)


CONFIGS = {
    "llama": ("LlamaForCausalLM", lambda: transformers.LlamaConfig(**GROUPED)),
    "qwen3": ("Qwen3ForCausalLM", lambda: transformers.Qwen3Config(**GROUPED, head_dim=16)),
    "gemma3": ("Gemma3ForCausalLM", _gemma3),
    "mixtral": (
        "MixtralForCausalLM",
        lambda: transformers.MixtralConfig(**GROUPED, num_local_experts=4, output_router_logits=True),
    ),
    "deepseek_v3": ("DeepseekV3ForCausalLM", _deepseek),
    "gpt_oss": ("GptOssForCausalLM", _gpt_oss),
    "modernbert": ("ModernBertForMaskedLM", _modernbert),
    "bert": (
        "BertForMaskedLM",
        lambda: transformers.BertConfig(**WIDTHS, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0),
    ),
    "bart": ("BartForConditionalGeneration", lambda: transformers.BartConfig(**SEQ2SEQ, max_position_embeddings=128)),
    "whisper": ("WhisperForConditionalGeneration", _whisper),
    "gpt2": ("GPT2LMHeadModel", _gpt2),
    "gpt_neox": ("GPTNeoXForCausalLM", lambda: transformers.GPTNeoXConfig(**WIDTHS)),
}
WITHOUT_SDPA = ("gpt_oss",)
PADDING = 5


@pytest.fixture
def everything_in_double(monkeypatch):
    """Let what models compute in float32 be computed in double precision."""
    importlib.import_module("lowtide.applying")  # it and the models' modules must know float32 as it is
    for kind, _ in CONFIGS.values():
        getattr(transformers, kind)
    monkeypatch.setattr(torch, "float32", torch.float64)
    monkeypatch.setattr(torch, "float", torch.float64)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


def make(name: str, attention: str = "sdpa", dtype: torch.dtype = torch.float64) -> torch.nn.Module:
    """Return a model in training mode, with weights large enough for attention not to be uniform."""
    torch.manual_seed(0)
    if name == "qwen3_vl":
        model = qwen3_vl()[0].to(dtype)
        model.set_attn_implementation(attention)
    else:
        kind, config = CONFIGS[name]
        model = getattr(transformers, kind)._from_config(config(), attn_implementation=attention).to(dtype)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # torch's grouped product knows no doubles
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(4 if weight.dim() > 1 else 1)
    return model.train()


def batch(name: str, *, padded: bool = False, rows: int = 2, length: int = 23) -> dict:
    """Return a batch; of `padded` rows the first begins with padding."""
    torch.manual_seed(1)
    if name == "qwen3_vl":
        given = qwen3_vl()[1]
        given |= {"pixel_values": given["pixel_values"].double()}
        return _with_padding_before(given) if padded else given
    ids = torch.randint(3, 90, (rows, length))
    if name == "whisper":
        given = {"input_features": torch.randn(rows, 8, 80).double(), "labels": ids}
        if padded:
            given["decoder_attention_mask"] = torch.ones_like(ids)
            given["decoder_attention_mask"][0, :PADDING] = 0
        return given
    given = {"input_ids": ids, "labels": ids[:, :19].clone() if name == "bart" else ids.clone()}
    if padded:
        mask = torch.ones_like(ids)
        mask[0, :PADDING] = 0
        given["attention_mask"] = mask
        if name != "bart":
            given["labels"][mask == 0] = -100
    return given


def _with_padding_before(given: dict) -> dict:
    """Return a batch with images whose rows all begin with padding."""
    ids = given["input_ids"]
    given = {
        name: nn.functional.pad(value, (PADDING, 0), value=-100 if name == "labels" else 0)
        if value.shape == ids.shape
        else value
        for name, value in given.items()
    }
    return given | {"attention_mask": nn.functional.pad(torch.ones_like(ids), (PADDING, 0))}


def step(model: torch.nn.Module, given: dict) -> dict[str, torch.Tensor]:
    """Run one step from a fixed seed, and return the loss and all gradients."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(7)
    loss = model(**given).loss
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return gradients | {"loss": loss.detach().clone()}


def error(ours: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Return the largest error of a gradient, relative to it or to a millionth of all gradients."""
    assert ours.keys() == expected.keys()
    total = torch.stack([value.double().norm() for value in expected.values()]).norm()
    pairs = ((ours[name].double(), value.double()) for name, value in expected.items())
    return max(float((one - two).norm() / (two.norm() + 1e-6 * total)) for one, two in pairs)
