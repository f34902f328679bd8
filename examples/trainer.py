"""Train with transformers' Trainer and a Lowtide policy; every reporter gets its figures.

    python examples/trainer.py
    torchrun --nproc-per-node 2 examples/trainer.py

The model is a small Llama with random weights, the dataset is generated. The trainer's own
`gradient_checkpointing=True` may stay: it is switched off while the policy is in force, and a warning says so once.
With TRL's SFTTrainer, use tile(mlp).
"""

from __future__ import annotations

import tempfile

import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, logging

from lowtide.integrations.transformers import attach

POLICY = "recompute+tile(mlp)"  # for GPUs: "recompute+offload+tile"


def main() -> None:
    logging.set_verbosity_error()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=192, num_hidden_layers=4, num_attention_heads=4
    )
    rows = [[(start + step) % 100 + 1 for step in range(64)] for start in range(32)]  # something to learn
    data = Dataset.from_dict({"input_ids": rows, "labels": rows})
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        max_steps=8,
        per_device_train_batch_size=2,
        learning_rate=3e-3,
        logging_steps=2,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,  # for GPUs: leave this out
    )
    trainer = Trainer(LlamaForCausalLM(config), arguments, train_dataset=data)
    callback = attach(trainer, POLICY)
    trainer.train()
    if trainer.is_world_process_zero():
        print("losses", [entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
        print("recomputes", trainer.state.log_history[-2]["lowtide/recomputes"], "as logged")
        print(callback.applied.report() if callback.applied is not None else "")
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main()
