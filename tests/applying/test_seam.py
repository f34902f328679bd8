"""A seam looks like the forward whose place it takes, to those who look: the Trainer, `generate`, accelerate."""

from __future__ import annotations

import copy
import inspect
import types

import pytest
import torch

import lowtide
from models.tiny import llama, transformers

accelerate = pytest.importorskip("accelerate", reason="the hf extra is not installed")
datasets = pytest.importorskip("datasets", reason="the hf extra is not installed")


def build():
    torch.manual_seed(0)
    model, batch = llama()
    model.config.use_cache = False
    return model.train(), batch


@pytest.mark.parametrize("policy", ["recompute", "tile(mlp)", "tile(loss)"])
def test_signatures_are_those_of_the_plain_model(policy):
    model, _ = build()
    plain = {name: inspect.signature(module.forward) for name, module in model.named_modules()}
    with lowtide.apply(model, policy):
        assert {name: inspect.signature(module.forward) for name, module in model.named_modules()} == plain


def test_a_trainer_made_after_the_policy_finds_its_columns(tmp_path):
    """It drops what forward has no argument for: a column of texts goes, the ids stay."""
    model, batch = build()
    rows = {"input_ids": batch["input_ids"].tolist(), "labels": batch["labels"].tolist(), "text": ["a", "b"]}
    applied = lowtide.apply(model, "recompute+tile(mlp, loss, tokens=8, loss_tokens=8)")
    arguments = transformers.TrainingArguments(
        str(tmp_path), max_steps=1, use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True
    )
    transformers.Trainer(model, arguments, train_dataset=datasets.Dataset.from_dict(rows)).train()
    assert [region.recomputes for region in applied.report().regions] == [1, 1]
    assert applied.report().tiles[-1].name == "lm_head"
    assert applied.report().tiles[-1].tiles == 6


def test_generate_makes_the_mask_that_it_makes_for_the_plain_model():
    """It looks at the signature to decide; without a mask, padding in front would be read as text."""
    model, _ = build()
    ids = torch.tensor([[0, 0, 0, 5, 6, 7], [9, 10, 11, 5, 6, 7]])
    settings = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    expected = model.eval().generate(ids, **settings)
    with lowtide.apply(model, "tile(loss)"):
        assert torch.equal(model.generate(ids, **settings), expected)


def test_a_forward_that_is_bound_anew_acts_once_and_a_copy_runs_plainly():
    """`Accelerator.unwrap_model(model, keep_fp32_wrapper=False)` makes a method of what it finds."""
    model, batch = build()
    applied = lowtide.apply(model, "tile(loss, loss_tokens=8)")
    model.forward = types.MethodType(model.forward.__func__, model)
    model(**batch).loss.backward()
    assert applied.report().tiles[0].calls == 1
    twin = copy.deepcopy(model)
    assert twin(**batch).logits.shape[-1] == 128
    assert applied.report().tiles[0].calls == 1


def test_an_accelerator_unwraps_a_model_with_a_tiled_loss():
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)  # other tests' Trainers leave theirs
    model, batch = build()
    applied = lowtide.apply(model, "tile(loss, loss_tokens=8)")
    accelerator = accelerate.Accelerator(mixed_precision="bf16", cpu=True)
    plain = inspect.signature(model.forward)
    prepared = accelerator.prepare(model)
    assert inspect.signature(prepared.forward) == plain
    prepared(**batch).loss.backward()
    accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)(**batch).loss.backward()
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    assert applied.report().tiles[0].calls == 2
