"""With transformers 4, plans are refused: its figures would not be right."""

from __future__ import annotations

import pytest
import torch
import transformers
from packaging.version import Version

from lowtide.errors import PlanError
from lowtide.targets import models
from lowtide.targets.batches import make_batch
from lowtide.targets.job import Job
from lowtide.targets.models import build
from lowtide.targets.target import find_target
from support import needs_transformers_5

TINY = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64}


@needs_transformers_5
@pytest.mark.parametrize(
    ("model_type", "named", "shape"),
    [
        ("bert", "BertForSequenceClassification", (2,)),
        ("bert", "BertForTokenClassification", (2, 8)),
        ("bert", "BertForMaskedLM", (2, 8)),
        ("llama", "LlamaForSequenceClassification", (2,)),
        ("llama", "LlamaForCausalLM", (2, 8)),
    ],
)
def test_the_class_that_a_configuration_names_is_planned(model_type: str, named: str, shape: tuple[int, ...]):
    config = transformers.AutoConfig.for_model(model_type, architectures=[named], pad_token_id=0, **TINY)
    job = Job(tokens=8, batch_size=2)
    model = build(find_target(config), job)
    assert type(model).__name__ == named
    assert make_batch(model, job, torch.device("cpu"))["labels"].shape == shape


@needs_transformers_5
def test_a_class_for_which_there_is_no_batch_is_refused():
    config = transformers.AutoConfig.for_model("bert", architectures=["BertForMultipleChoice"], **TINY)
    with pytest.raises(PlanError, match="names BertForMultipleChoice, and a plan makes no batch for that"):
        build(find_target(config), Job(tokens=8))


def test_a_model_of_transformers_4_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(models, "installed_version", lambda _: Version("4.57.6"))
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=32
    )
    with pytest.raises(
        PlanError, match=r"planning LlamaForCausalLM needs transformers 5 or newer, and 4.57.6 is installed"
    ):
        build(find_target(config), Job(tokens=8))
