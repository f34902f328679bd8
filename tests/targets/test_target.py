"""What a plan is of: configurations, names, files, live modules, their weights and adapters."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING

import pytest
import torch
import transformers

import lowtide
from lowtide import LowtideError
from lowtide.errors import InvalidValueError, MissingDependencyError, PlanError
from lowtide.hardware import find_accelerator
from lowtide.planning.max_fit import find_max
from lowtide.policy.rules import joined
from lowtide.simulation.region_costs import REGION_POLICIES
from lowtide.simulation.simulator import Simulator
from lowtide.targets.job import DTYPES, Job
from lowtide.targets.live_module import pickle_without_weights, unpickle
from lowtide.targets.models import build, read_arguments
from lowtide.targets.target import find_target, known_models
from models import own as own_model
from models.planned import CONFIG
from support import needs_transformers_5

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [needs_transformers_5, pytest.mark.usefixtures("cache")]


def test_a_config_file_and_its_folder_are_the_same_model(tmp_path: Path):
    CONFIG.save_pretrained(tmp_path / "tiny")
    plans = [
        lowtide.plan(where, tokens=512, device="L40S", policy="none")
        for where in (tmp_path / "tiny", str(tmp_path / "tiny" / "config.json"))
    ]
    assert plans[0].peak_bytes == plans[1].peak_bytes
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InvalidValueError, match="names no model_type"):
        lowtide.plan(tmp_path / "config.json", tokens=512, device="L40S")


def test_a_name_of_the_hub_is_its_configuration(tmp_path: Path):
    snapshot = tmp_path / "hub/models--org--tiny/snapshots/1"
    CONFIG.save_pretrained(snapshot)
    reference = tmp_path / "hub/models--org--tiny/refs/main"
    reference.parent.mkdir()
    reference.write_text("1")
    program = """
        from lowtide.errors import PlanError
        from lowtide.targets.target import find_target
        target = find_target("org/tiny")
        print(target.kind, target.name, b'"num_hidden_layers": 8' in target.content)
        try:
            find_target("org/other")
        except PlanError as error:
            print(error)
    """
    found = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env={**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    first, second = found.stdout.strip().split("\n", 1)
    assert first == "config org/tiny True"
    assert "'org/other' is not a file or folder here, and its configuration could not be fetched from the Hub" in second


@pytest.mark.parametrize("name", ["Qwen/Qwen3-VL-4B-Instruct", "qwen3-vl-4b", "Qwen3-VL-4B-Thinking"])
def test_how_weights_were_trained_does_not_matter(name: str):
    assert find_target(name) == find_target("Qwen3-VL-4B")


def test_a_module_is_planned_without_its_weights():
    model = transformers.LlamaForCausalLM(CONFIG)
    target = find_target(model)
    assert len(target.content) < 200_000
    assert sum(p.numel() for p in build(target, Job(tokens=8)).parameters()) == sum(
        p.numel() for p in model.parameters()
    )
    plan = lowtide.plan(model, tokens=512, device="L40S", policy="recompute")
    assert plan.summary.model_class == "LlamaForCausalLM"


class TestAModuleOfOnesOwn:
    """It has no configuration to make a batch from, so it comes with one."""

    def test_its_batch_is_what_it_is_planned_with(self):
        model, batch = own_model.tiny()
        plan = lowtide.plan(model, batch=batch, device="L40S", policy="recompute")
        assert plan.job.size == "its own batch"
        assert plan.summary.regions == ["blocks.0", "blocks.1", "blocks.2"]
        longer = lowtide.plan(
            model, batch=own_model.batch(tokens=2 * own_model.TOKENS), device="L40S", policy="recompute"
        )
        kept = own_model.TOKENS * own_model.WIDTH * 4
        assert longer.peak_bytes - plan.peak_bytes > 3 * kept, "three blocks' inputs, and what one of them computes"

    @pytest.mark.parametrize("form", [tuple, list], ids=["tuple", "list"])
    def test_arguments_may_be_positional(self, form: type):
        model, batch = own_model.tiny()
        plans = [
            lowtide.plan(model, batch=given, device="L40S", policy="none") for given in (batch, form(batch.values()))
        ]
        assert plans[0].peak_bytes == plans[1].peak_bytes

    def test_a_factory_may_return_both(self):
        model, batch = own_model.tiny()
        plans = [
            lowtide.plan("models.own:tiny", device="L40S", policy="none", dtype="fp32"),
            lowtide.plan(model, batch=batch, device="L40S", policy="none"),
        ]
        assert plans[0].peak_bytes == plans[1].peak_bytes

    def test_a_factory_takes_arguments(self):
        assert read_arguments("layers=4&scale=0.5&fused=true&name=a+b&none=None", "m:f") == {
            "layers": 4,
            "scale": 0.5,
            "fused": True,
            "name": "a+b",
            "none": None,
        }
        assert find_target("models.own:sized?tokens=64").kind == "factory"
        plans = [
            lowtide.plan(f"models.own:sized?tokens={tokens}", device="L40S", policy="none") for tokens in (64, 4096)
        ]
        assert plans[1].peak_bytes > plans[0].peak_bytes

    @pytest.mark.parametrize("query", ["layers", "=4", "a=1&a=2", "1x=3"])
    def test_wrong_arguments_of_a_factory_are_refused(self, query: str):
        with pytest.raises(InvalidValueError, match="write MODULE:FACTORY"):
            read_arguments(query, "m:f")

    def test_an_argument_that_a_factory_does_not_take_is_its_error(self):
        with pytest.raises(PlanError, match="unexpected keyword argument 'depth'"):
            lowtide.plan("models.own:sized?depth=3", device="L40S", policy="none")

    def test_apply_takes_a_batch_with_its_budget(self):
        model, batch = own_model.tiny()
        applied = lowtide.apply(model, budget="2GiB", batch=batch, device="L40S")
        assert applied.policy.is_none, "all of it fits"

    def test_regions_of_a_model_that_is_a_stack_itself_have_their_costs(self):
        target = find_target(own_model.Stack(), (torch.randn(1, own_model.TOKENS, own_model.WIDTH),))
        costs = Simulator(target, Job(), find_accelerator("L40S")).costs("", ("none", "recompute"))
        assert [region.name for region in costs.regions] == ["0", "1", "2"]
        assert all(region.by_policy["none"].waiting > region.by_policy["recompute"].waiting for region in costs.regions)

    def test_only_what_can_be_tiled_is_looked_at(self):
        model, batch = own_model.tiny()
        plan = lowtide.plan(model, batch=batch, device="L40S")
        applicable = [policy for policy in REGION_POLICIES if "keep=attention" not in policy]  # it has none
        assert {candidate.policy for candidate in plan.candidates} == {*applicable}
        assert any("not all of Own can be tiled" in note for note in plan.notes)
        assert any(note.startswith("tile(mlp) is left out: no call is long enough") for note in plan.notes)

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({}, r"give batch=, or a factory that returns \(model, batch\)"),
            ({"batch": own_model.batch(), "tokens": 512}, "a batch has its own size"),
            ({"batch": own_model.batch(), "batch_size": 2}, "a batch has its own size"),
            ({"batch": {"ids": own_model.batch()["ids"], "labels": None}}, "returns no loss"),
        ],
    )
    def test_what_does_not_go_together_is_refused(self, settings: dict, message: str):
        with pytest.raises(LowtideError, match=message):
            lowtide.plan(own_model.tiny()[0], device="L40S", policy="none", **settings)

    @pytest.mark.parametrize(
        ("name", "settings", "message"),
        [
            ("models.own:tiny", {"tokens": 512}, "brings its own batch"),
            ("models.own:tiny", {"batch_size": 4}, "brings its own batch"),
            ("models.own:blank", {}, 'make them with device="cpu"'),
            ("llama", {}, "give tokens="),
            ("llama", {"batch": own_model.batch()}, "goes with a module"),
        ],
    )
    def test_names_that_lack_something_are_refused(self, name: str, settings: dict, message: str):
        with pytest.raises(LowtideError, match=message):
            lowtide.plan(name, device="L40S", policy="none", **settings)


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("base", ["bf16", "fp32"])
def test_adapters_have_the_type_that_is_asked_for_whatever_the_bases(base: str, dtype: str):
    model = build(find_target(CONFIG), Job(tokens=8, lora=8, dtype=base, lora_dtype=dtype))
    kinds = {needs: {p.dtype for p in model.parameters() if p.requires_grad is needs} for needs in (True, False)}
    assert kinds == {True: {DTYPES[dtype]}, False: {DTYPES[base]}}


def test_a_model_without_mlps_of_their_own_is_planned_with_tiled_blocks_and_a_tiled_loss():
    config = transformers.BertConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=6, num_attention_heads=4, vocab_size=512
    )
    plan = lowtide.plan(config, tokens=512, device="L40S")
    assert {candidate.policy for candidate in plan.candidates} == {
        joined(policy, tile) for policy in REGION_POLICIES for tile in ("", "tile(loss)")
    }
    assert any("no call is long enough to be cut" in note for note in plan.notes), "its blocks are short"
    assert not any("mlp" in candidate.policy for candidate in plan.candidates)
    card = dataclasses.replace(find_accelerator("L40S"), memory=2**30)
    found = find_max(config, Job(tokens=512), card, dimension="batch_size")
    assert [row.policy for row in found] == [
        "none",
        "recompute",
        "recompute+tile(loss)",
        "recompute+offload+tile(loss)",
        "recompute(keep=attention)+offload+tile(attention, loss)",
        "recompute+offload+tile(attention, loss)",
    ]


def test_more_tokens_than_a_model_has_positions_are_named():
    config = transformers.BertConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=512
    )
    with pytest.raises(PlanError, match=r"could not be simulated.*513 tokens are more than the 512 positions"):
        lowtide.plan(config, tokens=513, device="L40S", policy="recompute")
    with pytest.raises(PlanError, match=r"2048 tokens are more than the 512 positions .* ask for the largest batch"):
        find_max(config, Job(tokens=512), find_accelerator("L40S"), policies=["recompute"])


def test_a_small_tensor_without_a_value_stays_without():
    """In the batch of a model that is built on the meta device; small ones with values keep them."""
    batch = {"prompt": torch.empty(2, 3, device="meta"), "step": torch.tensor([7])}
    _, found = unpickle(pickle_without_weights(torch.nn.Linear(2, 2), batch), "Linear")
    assert found["prompt"].is_meta
    assert found["prompt"].shape == (2, 3)
    assert found["step"].tolist() == [7]


def test_a_setting_that_a_live_model_has_already_is_refused():
    with pytest.raises(InvalidValueError, match="LlamaForCausalLM is planned as it is"):
        lowtide.plan(transformers.LlamaForCausalLM(CONFIG), tokens=512, device="L40S", lora=8, policy="none")


class TestTheTypeOfWeights:
    """A live module has one; what is built here gets the one that is asked for."""

    @pytest.mark.parametrize(("dtype", "name"), [(torch.float32, "fp32"), (torch.bfloat16, "bf16")])
    def test_a_live_module_is_planned_in_its_own(self, dtype: torch.dtype, name: str):
        model = transformers.LlamaForCausalLM(CONFIG).to(dtype)
        plan = lowtide.plan(model, tokens=512, device="L40S", policy="none")
        assert (plan.summary.dtype, plan.job.dtype) == (name, None)
        assert plan.owners["weights"] == pytest.approx(dtype.itemsize * plan.summary.parameters, rel=0.01)

    def test_another_one_is_refused_for_it(self):
        model = transformers.LlamaForCausalLM(CONFIG)
        with pytest.raises(InvalidValueError, match=r"dtype='bf16': LlamaForCausalLM is planned as it is.*model\.to"):
            lowtide.plan(model, tokens=512, device="L40S", policy="none", dtype="bf16")
        with pytest.raises(InvalidValueError, match="is planned as it is"):
            lowtide.apply(model, budget="3GiB", tokens=512, device="L40S", dtype="fp32")

    @pytest.mark.parametrize(("asked", "name"), [(None, "bf16"), ("fp32", "fp32")])
    def test_what_is_built_here_is_bf16_unless_told(self, asked: str | None, name: str):
        for target in (CONFIG, "models.own:tiny"):
            assert Simulator(find_target(target), Job(dtype=asked), find_accelerator("L40S")).summary.dtype == name


class TestLayersThatGetAdapters:
    def trained(self, *targets: str) -> int:
        model = build(find_target(CONFIG), Job(tokens=8, lora=8, lora_targets=targets))
        return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)

    def test_each_that_is_named_gets_them(self):
        one = self.trained("q_proj")
        assert self.trained("q_proj", "v_proj") == 2 * one
        assert self.trained("q_proj", "self_attn.v_proj") == 2 * one, "the end of a name, as in PEFT"
        assert self.trained("layers.0.self_attn.q_proj") == one / CONFIG.num_hidden_layers

    @pytest.mark.parametrize("targets", [("query",), ("q_proj", "v_projj"), ("q_proj", "proj"), ("q_proj", "mlp")])
    def test_one_that_is_not_there_is_refused(self, targets: tuple[str, ...]):
        with pytest.raises(InvalidValueError, match=f"no linear layer is called {targets[-1]}: there are down_proj"):
            self.trained(*targets)

    @pytest.mark.filterwarnings("ignore:fan_in_fan_out")
    def test_layers_of_gpt2_are_linear_too(self):
        config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=64, bos_token_id=1, eos_token_id=1)
        model = build(find_target(config), Job(tokens=8, lora=4, lora_targets=("c_attn",)))
        assert sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad) == 2 * 4 * 4 * 32

    def test_without_adapters_their_settings_are_refused(self):
        for setting in ({"lora_dtype": "bf16"}, {"lora_targets": "q_proj"}):
            with pytest.raises(InvalidValueError, match="are for adapters: give lora=16"):
                lowtide.plan(CONFIG, tokens=512, device="L40S", policy="none", **setting)


SIZES = {
    "Qwen3-VL-4B": 4.4,
    "Qwen3-VL-8B": 8.8,
    "Qwen2.5-VL-7B": 8.3,
    "Qwen3-4B": 4.0,
    "Qwen3-8B": 8.2,
    "Qwen3-14B": 14.8,
    "Qwen3-32B": 32.8,
    "Qwen3-30B-A3B": 30.5,
    "Llama-3.2-1B": 1.24,
    "Llama-3.2-3B": 3.2,
    "Llama-3.1-8B": 8.0,
    "Llama-3.3-70B": 70.6,
    "Mistral-7B": 7.25,
    "Mixtral-8x7B": 46.7,
    "Gemma-3-4B": 4.3,
    "Gemma-3-27B": 27.4,
    "gpt-oss-20b": 20.9,
}
"""Billions of weights, as their makers say."""


def test_without_transformers_a_model_type_is_not_called_unknown(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "transformers.models.auto.configuration_auto", None)
    with pytest.raises(
        MissingDependencyError, match=r"'llama' by name needs transformers.*uvx --from 'lowtide\[hf\]' lowtide"
    ):
        find_target("llama")


def test_every_known_model_has_its_size():
    assert set(SIZES) == set(known_models())


@pytest.mark.parametrize("name", SIZES)
def test_a_known_model_has_as_many_weights_as_its_makers_say(name: str):
    model = build(find_target(name), Job(tokens=8))
    assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(SIZES[name], rel=0.02)
    assert known_models()[name]["source"].startswith("huggingface.co/")
