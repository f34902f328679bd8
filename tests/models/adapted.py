"""Tiny transformers models in double precision, fully trained or with LoRA, and a batch for each rank."""

from __future__ import annotations

import peft
import torch
import transformers

from models import tiny as tiny_models

ADAPTATIONS = ["full", "lora", "lora, frozen embeddings"]
LENGTHS = (20, 36)
"""Of the two ranks' sequences: other lengths, and so other numbers of tiles."""

TEXT = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def llama():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**TEXT))


def mixtral():
    config = transformers.MixtralConfig(**TEXT, num_local_experts=4, output_router_logits=True)
    config._experts_implementation = "eager"  # torch's grouped product knows no doubles
    return transformers.MixtralForCausalLM(config)


def t5():
    """Not with T5's ReLU: what float32 rounds, as DeepSpeed has it, is another gradient at the kink."""
    config = transformers.T5Config(
        vocab_size=128, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, dropout_rate=0.0,
        feed_forward_proj="gelu",
    )  # fmt: skip
    config.decoder_start_token_id = 0
    return transformers.T5ForConditionalGeneration(config)


def qwen3_vl():
    return tiny_models.qwen3_vl()[0]


MODELS = {"llama": llama, "mixtral": mixtral, "t5": t5, "qwen3_vl": qwen3_vl}


def make(name: str, adaptation: str = "full", device: str = "cpu") -> torch.nn.Module:
    """The same weights in every process."""
    torch.manual_seed(0)
    model = MODELS[name]().double().train().to(device)
    model.tie_weights()  # a move to a device that torch does not know makes two parameters of one
    if adaptation == "full":
        return model
    targets = [n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and "." in n and "router" not in n]
    config = peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False)
    model = peft.get_peft_model(model, config).double()
    if adaptation == "lora":  # the embeddings are trained, too, so that hidden states need gradients from the start
        model.get_input_embeddings().weight.requires_grad_(True)
    return model.train()


def batch(name: str, rank: int, step: int = 0) -> dict:
    torch.manual_seed(100 + 10 * step + rank)
    if name == "qwen3_vl":
        inputs = tiny_models.qwen3_vl()[1]
        inputs["pixel_values"] = inputs["pixel_values"].double()
        extra = 4 * rank  # longer text behind the images
        ids = torch.cat([inputs["input_ids"], torch.randint(0, 100, (1, extra))], 1)
        return inputs | {"input_ids": ids, "labels": ids, "mm_token_type_ids": (ids == 150).long()}
    ids = torch.randint(1, 100, (2, LENGTHS[rank]))
    return {"input_ids": ids, "labels": ids}


def reference(name: str, adaptation: str, steps: int = 1) -> torch.nn.Module:
    """The plain model in one process on the joined batch, after its backward."""
    model = make(name, adaptation)
    for step in range(steps):
        sum(model(**batch(name, rank, step), use_cache=False).loss / 2 for rank in range(2)).backward()
    return model
