"""With transformers 4, plans are refused: its figures would not be right."""

from __future__ import annotations

import pytest
import transformers
from packaging.version import Version

from lowtide.errors import PlanError
from lowtide.targets import models
from lowtide.targets.job import Job
from lowtide.targets.models import build
from lowtide.targets.target import find_target


def test_a_model_of_transformers_4_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(models, "installed_version", lambda _: Version("4.57.6"))
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=32
    )
    with pytest.raises(
        PlanError, match=r"planning LlamaForCausalLM needs transformers 5 or newer, and 4.57.6 is installed"
    ):
        build(find_target(config), Job(tokens=8))
