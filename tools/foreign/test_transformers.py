"""The checks that transformers has for gradient checkpointing, run on the zoo's tiny models.

A source distribution of transformers holds the checks (`tests/test_modeling_common.py`) and not the models' own files,
so the zoo provides the models: one class per architecture here, made of their mixin. `LOWTIDE_FOREIGN` is the folder of
the unpacked distribution.
"""

from __future__ import annotations

import copy
import os
import sys
import types
import unittest
from typing import Any

import lowtide_zoo

ARCHITECTURES = (
    "llama", "qwen3", "qwen3_moe", "gemma3_text", "mixtral", "gpt2", "gpt_bigcode", "bert", "t5", "bart", "whisper",
    "vit", "clip", "llava", "zamba2", "xlstm", "deepseek_v3", "gpt_oss",
)  # fmt: skip


def _mixin() -> type:
    """Load their mixin. It imports two neighbours that the distribution lacks, and that its checks do not need."""
    package = types.ModuleType("foreign")
    package.__path__ = [os.path.join(os.environ["LOWTIDE_FOREIGN"], "tests")]  # noqa: PTH118  (a package's path)
    sys.modules["foreign"] = package
    for module, name in (
        ("exporters.test_export", "ExportTesterMixin"),
        ("generation.test_utils", "GenerationTesterMixin"),
    ):
        parent = types.ModuleType(f"foreign.{module.partition('.')[0]}")
        parent.__path__ = []
        stand_in = types.ModuleType(f"foreign.{module}")
        setattr(stand_in, name, type(name, (), {}))
        sys.modules.setdefault(parent.__name__, parent)
        sys.modules[stand_in.__name__] = stand_in
    from foreign.test_modeling_common import ModelTesterMixin

    return ModelTesterMixin


class _Tester:
    """What their mixin asks for a model: a configuration and a batch."""

    is_training = True

    def __init__(self, model_type: str) -> None:
        self.tiny = lowtide_zoo.find(model_type)
        self.model_class = type(self.tiny.build())
        batch = self.tiny.batch()
        self.batch_size, self.seq_length = 2, next((v.shape[1] for k, v in batch.items() if k.endswith("input_ids")), 8)

    def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, Any]]:
        return copy.deepcopy(self.tiny.build().config), self.tiny.batch()


def _checks_of(model_type: str, mixin: type) -> type:
    def set_up(self: Any) -> None:
        self.model_tester = _Tester(model_type)
        self.all_model_classes = (self.model_tester.model_class,)

    def prepare(_self: Any, inputs: dict[str, Any], _model_class: type, return_labels: bool = False) -> dict[str, Any]:
        return inputs if return_labels else {name: value for name, value in inputs.items() if name != "labels"}

    members = {"setUp": set_up, "_prepare_for_class": prepare, "test_all_params_have_gradient": False}
    return type(f"Test_{model_type}", (mixin, unittest.TestCase), members)


_theirs = _mixin()
globals().update({f"Test_{model_type}": _checks_of(model_type, _theirs) for model_type in ARCHITECTURES})
