"""A run as axolotl does it: its plugin manager, its schema and its trainer, around a tiny model. Imported in ranks.

axolotl's own `train` cannot be imported beside the TRL that the other tests use; these are the steps that it takes.
"""

from __future__ import annotations

import dataclasses
import tempfile

import torch
import transformers
from axolotl.core.trainers.base import AxolotlTrainer
from axolotl.core.training_args_base import AxolotlTrainingMixins
from axolotl.integrations.base import PluginManager
from axolotl.utils.config import prepare_plugins, validate_config
from axolotl.utils.dict import DictDefault
from datasets import Dataset

from models.tiny import llama

STEPS = 3
PLUGIN = "lowtide.integrations.axolotl.LowtidePlugin"


@dataclasses.dataclass
class Arguments(AxolotlTrainingMixins, transformers.TrainingArguments):
    pass


def validated(settings: dict) -> DictDefault:
    """A user's YAML after axolotl has read it."""
    needed = {
        "base_model": "tiny/llama",
        "micro_batch_size": 2,
        "gradient_accumulation_steps": 1,
        "learning_rate": 1e-3,
        "datasets": [{"path": "a/dataset", "type": "alpaca"}],
    }
    cfg = DictDefault(needed | settings)
    prepare_plugins(cfg)
    return validate_config(cfg)


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return llama()[0]


def make_trainer(cfg: DictDefault, one: torch.nn.Module, folder: str) -> AxolotlTrainer:
    manager = PluginManager.get_instance()
    rows = torch.randint(1, 100, (12, 20), generator=torch.Generator().manual_seed(0)).tolist()
    arguments = Arguments(
        output_dir=folder, max_steps=STEPS, per_device_train_batch_size=cfg.micro_batch_size, use_cpu=True, seed=1,
        logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True, learning_rate=cfg.learning_rate,
        gradient_checkpointing=bool(cfg.gradient_checkpointing), ddp_find_unused_parameters=True,
    )  # fmt: skip
    trainer = AxolotlTrainer(
        model=one,
        args=arguments,
        train_dataset=Dataset.from_dict({"input_ids": rows, "labels": rows}),
        data_collator=transformers.default_data_collator,
        callbacks=manager.add_callbacks_pre_trainer(cfg, one),
    )
    for callback in manager.add_callbacks_post_trainer(cfg, trainer):
        trainer.add_callback(callback)
    manager.post_trainer_create(cfg, trainer)
    return trainer


def train(settings: dict) -> tuple[DictDefault, AxolotlTrainer]:
    manager = PluginManager.get_instance()
    cfg = validated(settings)
    manager.pre_model_load(cfg)
    one = model()
    manager.post_model_build(cfg, one)
    manager.post_model_load(cfg, one)
    assert all("forward" not in module.__dict__ for module in one.modules()), "loading a model leaves it alone"
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(cfg, one, folder)
        trainer.train()
    manager.post_train(cfg, trainer.model)
    manager.post_train_unload(cfg)
    return cfg, trainer


def weights(trainer: AxolotlTrainer) -> dict:
    return {name: p.detach().clone().numpy() for name, p in trainer.model.named_parameters()}
