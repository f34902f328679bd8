"""Run under torchrun by `test_torchrun.py`: a Trainer on two ranks, with its own checkpointing flag on, too."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
import transformers
from datasets import Dataset

sys.path.insert(0, str(Path(__file__).parents[1]))

from lowtide.integrations.transformers import LowtideCallback
from tiny_models import llama


def main() -> None:
    torch.manual_seed(0)
    model, _ = llama()
    rows = torch.randint(1, 100, (16, 20), generator=torch.Generator().manual_seed(0)).tolist()
    callback = LowtideCallback("recompute+tile(tokens=16, loss_tokens=16)")
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder, max_steps=3, per_device_train_batch_size=2, use_cpu=True, logging_steps=1, report_to=[],
            disable_tqdm=True, save_strategy="no", gradient_checkpointing=True,
            gradient_checkpointing_kwargs={"use_reentrant": True}, ddp_find_unused_parameters=True,
        )  # fmt: skip
        trainer = transformers.Trainer(
            model,
            arguments,
            train_dataset=Dataset.from_dict({"input_ids": rows, "labels": rows}),
            callbacks=[callback],
        )
        trainer.train()
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    others = [torch.empty_like(weights) for _ in range(2)]
    torch.distributed.all_gather(others, weights)
    assert torch.equal(*others), "the ranks agree"
    recomputes = [region.recomputes for region in callback.applied.report().regions]
    print(f"rank {torch.distributed.get_rank()}: recomputes {recomputes}", flush=True)  # noqa: T201  (the test reads it)


if __name__ == "__main__":
    main()
