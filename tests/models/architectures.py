"""Tiny models of many transformers architectures with random weights, with and without LoRA, and a training step."""

from __future__ import annotations

import pytest
import torch

from models.tiny import IS_4, transformers

peft = pytest.importorskip("peft", reason="the hf extra is not installed")


TEXT = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


VIT = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 4,
}


def ids(count: int = 48) -> torch.Tensor:
    return torch.randint(1, 100, (1, count))


def language(batch_size: int = 1) -> dict:
    tokens = torch.randint(1, 100, (batch_size, 48))
    return {"input_ids": tokens, "labels": tokens}


def llama():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**TEXT, attention_dropout=0.1)), language()


def qwen3():
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**TEXT, head_dim=8)), language()


def gemma3():
    config = transformers.Gemma3TextConfig(**TEXT, head_dim=8, sliding_window=16)
    return transformers.Gemma3ForCausalLM(config), language()


def mixtral():
    config = transformers.MixtralConfig(**TEXT, num_local_experts=4, output_router_logits=True)
    return transformers.MixtralForCausalLM(config), language()


def gpt_bigcode():
    config = transformers.GPTBigCodeConfig(vocab_size=128, n_embd=32, n_layer=3, n_head=4, n_positions=64)
    return transformers.GPTBigCodeForCausalLM(config), language()


def zamba2():
    config = transformers.Zamba2Config(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        layers_block_type=["mamba", "hybrid", "mamba", "hybrid"],
        num_attention_heads=4,
        num_key_value_heads=4,
        attention_head_dim=16,
        mamba_d_state=8,
        mamba_headdim=16,
        n_mamba_heads=4,
        num_mem_blocks=1,
        use_mem_rope=False,
        chunk_size=16,
    )
    model = transformers.Zamba2ForCausalLM(config)
    if IS_4:  # patterns, which peft 0.21 takes for names; the weights are one tensor already
        model._tied_weights_keys = [key for key in model._tied_weights_keys if isinstance(key, str)]
    return model, language() | {"use_cache": False}  # a cache takes another path


def xlstm():
    config = transformers.xLSTMConfig(vocab_size=128, hidden_size=128, num_hidden_layers=3, num_heads=4, mode="train")
    tokens = ids(config.chunk_size)
    return transformers.xLSTMForCausalLM(config), {"input_ids": tokens, "labels": tokens, "use_cache": False}


def t5():
    config = transformers.T5Config(vocab_size=128, d_model=32, d_kv=8, d_ff=64, num_layers=3, num_heads=4)
    config.decoder_start_token_id = 0
    return transformers.T5ForConditionalGeneration(config), {"input_ids": ids(), "labels": ids(16)}


def whisper():
    config = transformers.WhisperConfig(
        vocab_size=128,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        max_source_positions=40,
        max_target_positions=40,
        num_mel_bins=16,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    return transformers.WhisperForConditionalGeneration(config), {
        "input_features": torch.randn(1, 16, 80),
        "labels": ids(16),
    }


def vit():
    model = transformers.ViTForImageClassification(transformers.ViTConfig(**VIT, num_labels=3))
    return model, {"pixel_values": torch.randn(4, 3, 16, 16), "labels": torch.tensor([0, 1, 2, 0])}


def swin():
    config = transformers.SwinConfig(
        image_size=32, patch_size=2, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4, num_labels=3
    )
    model = transformers.SwinForImageClassification(config)
    return model, {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.tensor([0, 2])}


def swiftformer():
    config = transformers.SwiftFormerConfig(
        image_size=64, depths=[2, 2], embed_dims=[16, 32], mlp_ratio=2, num_labels=3, downsamples=[True, True]
    )
    model = transformers.SwiftFormerForImageClassification(config)
    return model, {"pixel_values": torch.randn(2, 3, 64, 64), "labels": torch.tensor([0, 2])}


def llama4_vision():
    """Its layers get their hidden state as a keyword: transformers' own offload packs none of them."""
    config = transformers.Llama4VisionConfig(
        **VIT | {"intermediate_size": 128},
        projector_input_dim=32,
        projector_output_dim=32,
        vision_output_dim=32,
        pixel_shuffle_ratio=0.5,
    )
    return transformers.Llama4VisionModel(config), {"pixel_values": torch.randn(4, 3, 16, 16)}


def clvp():
    """Does not support gradient checkpointing at all."""
    sub = {
        "hidden_size": 128,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "vocab_size": 300,
        "projection_dim": 16,
    }
    decoder = sub | {"n_inner": 64, "feature_size": 16, "max_text_tokens": 64, "max_position_embeddings": 64}
    config = transformers.ClvpConfig(text_config=sub, speech_config=sub, decoder_config=decoder, projection_dim=16)
    batch = {"input_ids": ids(24), "input_features": torch.randn(1, 16, 20), "return_loss": True}
    return transformers.ClvpModelForConditionalGeneration(config), batch


def with_lora(model: torch.nn.Module) -> torch.nn.Module:
    kinds = torch.nn.Linear | transformers.pytorch_utils.Conv1D
    linear = [name for name, module in model.named_modules() if isinstance(module, kinds) and "." in name]
    config = peft.LoraConfig(r=4, lora_dropout=0.1, target_modules=linear, init_lora_weights=False)
    return peft.get_peft_model(model, config)


def make(build, device: str, *, lora: bool):
    torch.manual_seed(0)
    model, batch = build()
    if lora:
        model = with_lora(model)
    batch = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in batch.items()}
    return model.to(device).train(), batch


def loss_of(output) -> torch.Tensor:
    if getattr(output, "loss", None) is not None:
        return output.loss
    return output[0].float().square().mean()


def train_step(model, batch):
    model.zero_grad()
    torch.manual_seed(2)
    loss = loss_of(model(**batch))
    loss.backward()
    return {"loss": loss.detach().cpu()} | {
        name: parameter.grad.cpu() for name, parameter in model.named_parameters() if parameter.grad is not None
    }
