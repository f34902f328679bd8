"""Run under torchrun by `test_torchrun.py`: a Trainer on two ranks, plainly and then under a policy, in one engine.

    torchrun ... trainer_on_ranks.py ddp|zero2|zero3 [lora]

With DDP, the model's own reentrant checkpointing is asked for, too. DeepSpeed wraps the model before the callback acts.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from datasets import Dataset

sys.path.insert(0, str(Path(__file__).parents[1]))

from lowtide.integrations.transformers import LowtideCallback
from models.tiny import llama

POLICY = "recompute+tile(tokens=16, loss_tokens=16)"
TOLERANCE = 1e-6
"""Tiles add up in another order."""


def settings_of(engine: str) -> dict[str, Any]:
    if engine == "ddp":
        return {
            "gradient_checkpointing": True,
            "gradient_checkpointing_kwargs": {"use_reentrant": True},
            "ddp_find_unused_parameters": True,
        }
    return {
        "deepspeed": {
            "zero_optimization": {"stage": int(engine.removeprefix("zero"))},
            "train_micro_batch_size_per_gpu": "auto",
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        }
    }


def train(engine: str, policy: str, *, lora: bool) -> tuple[torch.Tensor, list[int]]:
    """The weights after three steps, whole, and how often each block was recomputed."""
    torch.manual_seed(0)
    model, _ = llama()
    if lora:
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    rows = torch.randint(1, 100, (16, 20), generator=torch.Generator().manual_seed(0)).tolist()
    callback = LowtideCallback(policy)
    settings = settings_of(engine) if policy != "none" or engine != "ddp" else {}
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder, max_steps=3, per_device_train_batch_size=2, use_cpu=True, logging_steps=1, report_to=[],
            disable_tqdm=True, save_strategy="no", learning_rate=1e-3, **settings,
        )  # fmt: skip
        trainer = transformers.Trainer(
            model,
            arguments,
            train_dataset=Dataset.from_dict({"input_ids": rows, "labels": rows}),
            callbacks=[callback],
        )
        trainer.train()
    with gathered(model):
        weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    return weights, [region.recomputes for region in callback.applied.report().regions]


def gathered(model: torch.nn.Module) -> Any:
    if not any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        return contextlib.nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(list(model.parameters()))


def main() -> None:
    engine, lora = sys.argv[1], "lora" in sys.argv
    plain, _ = train(engine, "none", lora=lora)
    weights, recomputes = train(engine, POLICY, lora=lora)
    others = [torch.empty_like(weights) for _ in range(2)]
    torch.distributed.all_gather(others, weights)
    assert torch.equal(*others), "the ranks agree"
    assert (weights - plain).abs().max() < TOLERANCE, "and on what the plain model learns"
    print(f"rank {torch.distributed.get_rank()}: recomputes {recomputes}", flush=True)  # noqa: T201  (the test reads it)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
