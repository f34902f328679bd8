"""`apply` with tiles on real transformers models in double precision: the gradients of the untiled model."""

from __future__ import annotations

import pytest
import torch

import lowtide
from lowtide.errors import LogitsNotComputedError, NoRegionError, NotTokenWiseError, SilentNoOpError
from models import architectures
from models.in_double import assert_same, make
from models.tiny import IS_4, qwen3_vl, transformers
from support import ignore_dropped_caches
from support.foreign_warnings import ignore_warnings_of

peft = architectures.peft

pytestmark = [ignore_warnings_of("peft", "torch", "transformers"), ignore_dropped_caches]


def gpt2():
    config = transformers.GPT2Config(vocab_size=128, n_embd=32, n_layer=3, n_head=4, n_positions=64)
    return transformers.GPT2LMHeadModel(config), architectures.language(2)


def gemma2():
    """Bends its logits."""
    config = transformers.Gemma2Config(**architectures.TEXT, head_dim=8, sliding_window=16, final_logit_softcapping=5.0)
    return transformers.Gemma2ForCausalLM(config), architectures.language(2)


def cohere():
    """Multiplies its logits."""
    return transformers.CohereForCausalLM(
        transformers.CohereConfig(**architectures.TEXT, logit_scale=0.25)
    ), architectures.language(2)


def granite():
    """Divides its logits."""
    config = transformers.GraniteConfig(**architectures.TEXT, logits_scaling=4.0)
    return transformers.GraniteForCausalLM(config), architectures.language(2)


def gpt_oss():
    """Experts in stacked weights."""
    config = transformers.GptOssConfig(**architectures.TEXT, head_dim=8, num_local_experts=4, output_router_logits=True)
    return transformers.GptOssForCausalLM(config), architectures.language(2)


def qwen3_moe():
    config = transformers.Qwen3MoeConfig(
        **architectures.TEXT,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        mlp_only_layers=[1],
    )
    return transformers.Qwen3MoeForCausalLM(config), architectures.language(2)


def deepseek_v3():
    """Shared experts beside routed ones, and a buffer in the router."""
    config = transformers.DeepseekV3Config(
        **architectures.TEXT | {"num_key_value_heads": 4},
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        moe_intermediate_size=16,
        first_k_dense_replace=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
    )
    model = transformers.DeepseekV3ForCausalLM(config)
    if IS_4:
        for layer in model.model.layers[1:]:
            weigh_in_double(layer.mlp.gate)
    return model, architectures.language(2)


def weigh_in_double(router):
    """Transformers 4.57 adds up what experts return in the precision of the router's weights, whatever theirs is."""
    kind = type(router)

    def forward(self, hidden_states):
        chosen, weights = kind.forward(self, hidden_states)
        return chosen, weights.double()

    router.__class__ = type(kind.__name__, (kind,), {"forward": forward})


def gemma3_vl():
    """Shifts and masks its logits itself."""
    config = transformers.Gemma3Config(
        text_config=architectures.TEXT | {"head_dim": 8, "sliding_window": 16},
        vision_config=architectures.VIT,
        mm_tokens_per_image=4,
        image_token_index=127,
        boi_token_index=125,
        eoi_token_index=126,
    )
    ids = torch.randint(1, 100, (2, 40))
    ids[:, 5:9] = 127
    mask = torch.ones_like(ids)
    mask[1, 30:] = 0
    batch = {
        "input_ids": ids,
        "labels": ids,
        "attention_mask": mask,
        "pixel_values": torch.randn(2, 3, 16, 16),
        "token_type_ids": (ids == 127).long(),
    }
    return transformers.Gemma3ForConditionalGeneration(config), batch


def llama4():
    config = transformers.Llama4TextConfig(
        **architectures.TEXT | {"intermediate_size_mlp": 64, "num_local_experts": 4, "head_dim": 8}, pad_token_id=0
    )
    return transformers.Llama4ForCausalLM(config), architectures.language(2)


DENSE = [
    architectures.llama,
    architectures.qwen3,
    architectures.gemma3,
    gpt2,
    gemma2,
    cohere,
    granite,
    architectures.gpt_bigcode,
    architectures.t5,
    qwen3_vl,
    gemma3_vl,
]
ROUTED = [
    architectures.mixtral,
    gpt_oss,
    qwen3_moe,
    deepseek_v3,
    llama4,
]  # some route in single precision, whatever the model
FORMS = [
    *((build, False) for build in [*DENSE, *ROUTED, architectures.whisper]),
    *((build, True) for build in [*DENSE, architectures.mixtral, gpt_oss, architectures.whisper]),
]


@pytest.mark.parametrize("policy", ["tile(mlp, tokens=10)", "recompute+tile(mlp, tokens=10)"])
@pytest.mark.parametrize(("build", "lora"), [form for form in FORMS if form[0] is not architectures.whisper])
def test_mlps_and_experts(build, policy, lora):
    model, batch = make(build, lora=lora)
    expected = architectures.train_step(model, batch)
    tolerance = 1e-6 if build in ROUTED else 1e-11
    with lowtide.apply(model, policy) as applied:
        assert_same(architectures.train_step(model, batch), expected, tolerance)
        tiles = applied.report().tiles
    assert len(tiles) >= len(applied.regions) > 0
    used = [ledger for ledger in tiles if ledger.calls]
    assert len(used) >= 2
    assert all(ledger.tiles > ledger.calls for ledger in used)
    assert sum(ledger.recomputed_tiles for ledger in used) > 0
    assert_same(architectures.train_step(model, batch), expected, 0)


@pytest.mark.parametrize(("build", "lora"), FORMS)
def test_loss(build, lora):
    model, batch = make(build, lora=lora)
    expected = architectures.train_step(model, batch)
    with lowtide.apply(model, "tile(loss, loss_tokens=10)") as applied:
        ours = architectures.train_step(model, batch)
        assert_same(ours, expected, 2e-6)  # transformers casts logits to single precision, whatever they are
        (head,) = applied.report().tiles
        assert head.calls == 1
        assert head.tiles > 1
    assert_same(architectures.train_step(model, batch), expected, 0)


@pytest.mark.parametrize("items", [17, torch.tensor(23)])
def test_the_number_of_items_in_the_batch(items):
    model, batch = make(architectures.llama)
    expected = architectures.train_step(model, batch | {"num_items_in_batch": items})
    with lowtide.apply(model, "tile(loss, loss_tokens=10)"):
        assert_same(architectures.train_step(model, batch | {"num_items_in_batch": items}), expected, 2e-6)


def test_everything_together():
    model, batch = make(architectures.mixtral)
    expected = architectures.train_step(model, batch)
    with lowtide.apply(model, "recompute+tile(tokens=10, loss_tokens=10)") as applied:
        assert_same(architectures.train_step(model, batch), expected, 2e-6)
        text = str(applied.report())
    assert "model.layers.0-2 x3 [tile] calls 1, tiles 5" in text
    assert "lm_head [tile] calls 1, tiles 5" in text


def test_an_adapter_on_the_head():
    model, batch = make(architectures.llama)
    config = peft.LoraConfig(r=4, target_modules=["lm_head", "up_proj"], init_lora_weights=False)
    model = peft.get_peft_model(model, config).double()
    expected = architectures.train_step(model, batch)
    with lowtide.apply(model, "tile(loss, loss_tokens=10)") as applied:
        assert_same(architectures.train_step(model, batch), expected, 2e-6)
        assert applied.report().tiles[0].recomputed_tiles > 0


class TestLogits:
    def outputs(self, policy="tile(loss, loss_tokens=10)"):
        model, batch = make(gemma2)
        plain = model(**batch).logits.detach()
        lowtide.apply(model, policy)
        return model(**batch), plain

    def test_reading_them_gets_a_clear_answer(self):
        outputs, _ = self.outputs()
        with pytest.raises(LogitsNotComputedError, match=r"never computed.*argmax.*outputs\.loss.*materialize"):
            outputs.logits.argmax(-1)
        with pytest.raises(LogitsNotComputedError, match="passed to softmax"):
            torch.softmax(outputs.logits, -1)
        with pytest.raises(LogitsNotComputedError, match="written to"):
            outputs.logits[:, :, :3] = 0
        with pytest.raises(LogitsNotComputedError, match="indexed"):
            outputs.logits[..., :5]
        with pytest.raises(LogitsNotComputedError, match="reshaped"):
            outputs.logits.view(-1, 7)

    @pytest.mark.parametrize(
        "operation",
        [
            lambda logits: logits - 1,
            lambda logits: 1 / logits,
            lambda logits: -logits,
            lambda logits: logits**2,
            lambda logits: logits > 0,
            lambda logits: logits == 0,
            bool,
        ],
    )
    def test_computing_with_them_gets_the_same_answer(self, operation):
        outputs, plain = self.outputs()
        with pytest.raises(LogitsNotComputedError, match="they were computed with"):
            operation(outputs.logits)
        assert len(outputs.logits) == len(plain)

    def test_they_can_be_had(self):
        outputs, plain = self.outputs()
        assert outputs.logits.shape == plain.shape
        torch.testing.assert_close(outputs.logits.materialize().detach(), plain)

    def test_without_labels_and_in_evaluation_they_are_there(self):
        model, batch = make(architectures.llama)
        lowtide.apply(model, "tile(loss)")
        ids = {"input_ids": batch["input_ids"]}
        assert model(**ids).logits.requires_grad
        model.eval()
        assert torch.is_tensor(model(**batch).logits)
        with torch.no_grad():
            assert torch.is_tensor(model.train()(**batch).logits)

    def test_a_loss_made_elsewhere_is_not_silent(self):
        model, batch = make(architectures.llama)
        lowtide.apply(model, "recompute+tile(loss)")
        logits = model(input_ids=batch["input_ids"]).logits
        with pytest.raises(SilentNoOpError, match="called without labels"):
            logits.float().logsumexp(-1).sum().backward()


class TestRefused:
    def test_no_mlp_as_a_module(self):
        """Whisper's layers hold the two linear layers themselves."""
        model, _ = make(architectures.whisper)
        before = dict(model.model.encoder.layers[0].__dict__)
        with pytest.raises(NoRegionError, match=r"tile\(mlp\): no region of Whisper"):
            lowtide.apply(model, "tile(mlp)")
        assert model.model.encoder.layers[0].__dict__ == before

    def test_no_head(self):
        with pytest.raises(NoRegionError, match=r"tile\(loss\): LlamaModel has no head"):
            lowtide.apply(make(architectures.llama)[0].model, "tile(loss)")

    def test_an_mlp_that_is_bypassed(self):
        model, batch = make(architectures.llama)
        lowtide.apply(model, "tile(mlp)")
        for layer in model.model.layers:
            layer.mlp._call_impl = lambda x, layer=layer: layer.mlp.down_proj(layer.mlp.up_proj(x))
        for layer in model.model.layers:
            layer.mlp.__dict__["forward"].runtime = None
        with pytest.raises(SilentNoOpError, match=r"layers\.0\.mlp to run in tiles, saw no call"):
            architectures.train_step(model, batch)


def test_rules_choose_modules():
    model, batch = make(architectures.llama)
    applied = lowtide.apply(model, "tile(mlp, tokens=10); *.layers.0: none; *.layers.1.mlp: none")
    architectures.train_step(model, batch)
    assert [ledger.name for ledger in applied.report().tiles] == ["model.layers.2.mlp"]


def test_a_trial_leaves_no_trace():
    """Router logits are recorded by hooks, and routers may count in buffers: the trial touches neither."""
    model, batch = make(architectures.mixtral)
    plain = model(**batch)
    lowtide.apply(model, "tile(mlp, tokens=10)")
    state = torch.get_rng_state()
    tiled = model(**batch)
    assert torch.equal(torch.get_rng_state(), state)
    rows = [sum(len(logits) for logits in output.router_logits) for output in (plain, tiled)]
    assert rows[0] == rows[1]
    torch.testing.assert_close(tiled.aux_loss, plain.aux_loss)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation_without_gradients(mode):
    """Lightning validates in inference mode, before the first training step."""
    model, batch = make(architectures.llama)
    expected = model.eval()(**batch).logits
    applied = lowtide.apply(model, "tile(mlp, tokens=10)")
    with mode():
        torch.testing.assert_close(model(**batch).logits, expected.detach())
    assert applied.report().tiles[0].tiles > 1
    architectures.train_step(model.train(), batch)


class Mixing(torch.nn.Module):
    """Looks like an MLP, and is not token-wise."""

    def __init__(self, how) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(32, 64), torch.nn.Linear(64, 32)
        self.how = how

    def forward(self, x):
        return self.how(self.down(torch.relu(self.up(x))))


def limited_capacity(x, factor=2.0):
    """Each of four experts takes a limited number of tokens, first come first served."""
    flat = x.reshape(-1, x.shape[-1])
    expert = flat[:, :4].argmax(-1)
    rank = torch.nn.functional.one_hot(expert, 4).cumsum(0).gather(1, expert[:, None]).squeeze(1)
    return (flat * (rank <= factor * len(flat) / 4)[:, None]).reshape(x.shape)


MIXERS = {
    "depends on the other tokens": [
        lambda x: x - x.mean(1, keepdim=True),
        lambda x: x + x.roll(1, 1),
        lambda x: x.cumsum(1),
        limited_capacity,
    ],
    "depends on the token's position": [
        lambda x: x * torch.arange(1, x.shape[1] + 1)[:, None],
        lambda x: limited_capacity(x, 0.2),
    ],
}


@pytest.mark.parametrize(("says", "how"), [(says, how) for says, hows in MIXERS.items() for how in hows])
def test_a_module_that_is_not_token_wise_is_refused_by_name(says, how):
    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = Mixing(how)

        def forward(self, x):
            return x + self.mlp(x)

    torch.manual_seed(0)
    model = torch.nn.ModuleList(Block() for _ in range(2))
    lowtide.apply(model, "tile(mlp, tokens=10)")
    with pytest.raises(NotTokenWiseError, match=rf"0\.mlp \(Mixing\) cannot be tiled: .*{says}.*rule"):
        model[0](torch.randn(2, 30, 32))


def test_batch_norm_in_an_mlp_is_refused_and_its_statistics_stay():
    class Normed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down, self.norm = torch.nn.Linear(32, 64), torch.nn.Linear(64, 32), torch.nn.BatchNorm1d(64)

        def forward(self, x):
            return self.down(self.norm(self.up(x).flatten(0, 1)).view(*x.shape[:2], 64))

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = Normed()

        def forward(self, x):
            return x + self.mlp(x)

    model = torch.nn.ModuleList(Block() for _ in range(2))
    lowtide.apply(model, "tile(mlp, tokens=10)")
    with pytest.raises(NotTokenWiseError, match="other tokens"):
        model[0](torch.randn(2, 30, 32))
    assert model[0].mlp.norm.num_batches_tracked == 0
