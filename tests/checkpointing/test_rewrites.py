"""PEFT's adapters on experts and routers write weights anew in every forward, with what they held."""

from __future__ import annotations

import peft
import pytest
import torch

import lowtide
from lowtide.errors import InPlaceError
from models.tiny import IS_4, transformers
from support.foreign_warnings import ignore_warnings_of

pytestmark = [
    ignore_warnings_of("peft", "torch", "transformers"),
    pytest.mark.skipif(IS_4, reason="experts are parameters of three dimensions since transformers 5"),
]

EXPERTS = {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
ROUTERS = {"target_modules": "all-linear"}


def adapted(targets):
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=96,
        num_local_experts=4,
        num_experts_per_tok=2,
    )
    model = peft.get_peft_model(
        transformers.MixtralForCausalLM(config), peft.LoraConfig(r=4, init_lora_weights=False, **targets)
    )
    return model.train()


def loss(model, seed):
    ids = torch.randint(0, 96, (2, 16), generator=torch.Generator().manual_seed(seed))
    return model(input_ids=ids, labels=ids, use_cache=False).loss


def gradients(model):
    """Of three steps, the last of which has two forwards before its backwards, the older first."""
    for seed in range(2):
        loss(model, seed).backward()
    older, newer = loss(model, 2), loss(model, 3)
    older.backward()
    newer.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("policy", ["recompute", "recompute(keep=attention)"])
@pytest.mark.parametrize("targets", [EXPERTS, ROUTERS], ids=["experts", "routers"])
def test_gradients_are_those_of_the_plain_model(targets, policy):
    expected = gradients(adapted(targets))
    applied = lowtide.apply(model := adapted(targets), policy)
    found = gradients(model)
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad, rtol=0, atol=0)
    assert all(region.recomputes == region.forwards == 4 for region in applied.report().regions)


def test_a_weight_that_is_changed_before_backward_is_refused():
    lowtide.apply(model := adapted(EXPERTS), "recompute")
    loss(model, 0).backward()
    later = loss(model, 1)
    weight = model.base_model.model.model.layers[0].mlp.experts.base_layer.base_layer.down_proj
    with torch.no_grad():
        weight.mul_(0.5)
    with pytest.raises(InPlaceError, match="down_proj"):
        later.backward()
