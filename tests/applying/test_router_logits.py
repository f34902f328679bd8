"""Router logits that transformers records inside a tiled mixture of experts are those of the whole call."""

from __future__ import annotations

import pytest
import torch
import transformers

import lowtide


def make():
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        output_router_logits=True,
    )
    config._experts_implementation = "eager"
    model = transformers.MixtralForCausalLM(config).double().train()
    ids = torch.randint(1, 64, (2, 12))
    mask = torch.ones_like(ids)
    mask[1, 8:] = 0  # padding, which the router's loss leaves out
    return model, {"input_ids": ids, "labels": ids, "attention_mask": mask, "use_cache": False}


@pytest.mark.parametrize("policy", ["tile(mlp, tokens=5)", "recompute+tile(mlp, tokens=5)"])
def test_one_entry_per_layer(policy):
    model, batch = make()
    plain = model(**batch)
    plain.loss.backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    model, batch = make()
    applied = lowtide.apply(model, policy)
    tiled = model(**batch)
    tiled.loss.backward()
    assert all(ledger.tiles > ledger.calls for ledger in applied.report().tiles)
    assert [logits.shape for logits in tiled.router_logits] == [logits.shape for logits in plain.router_logits]
    torch.testing.assert_close(tiled.aux_loss, plain.aux_loss)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-6, atol=1e-12)
