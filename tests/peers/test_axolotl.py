"""axolotl's real plugin manager, schema and trainer with Lowtide's plugin: the same weights as without it."""

from __future__ import annotations

import importlib
import os
import tempfile
import warnings

import pytest
import torch

import lowtide
from models.tiny import llama
from support.beside_ours import enable_sim, skip_without, step
from support.launcher import RankFailedError, run_ranks, with_backend

skip_without("axolotl")

PLUGINS = {"plugins": ["lowtide.integrations.axolotl.LowtidePlugin"]}
WORDS = ("lowtide", "gradient_checkpointing", "selective_checkpointing", "tiled_mlp")
LAYERS = 2
STEPS = 3


def axolotl_run():
    return importlib.import_module("support.axolotl_run")


def plugin():
    manager = importlib.import_module("axolotl.integrations.base").PluginManager.get_instance()
    return manager.plugins[PLUGINS["plugins"][0]]


def trained(rank: int, settings: dict) -> dict:
    # as `accelerate launch --cpu` would; the ranks have met, so the address is only looked at
    os.environ |= {"ACCELERATE_USE_CPU": "true", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    run = axolotl_run()
    cfg, trainer = run.train(settings)
    found = {
        "weights": run.weights(trainer),
        "config": {name: cfg.get(name) for name in WORDS},
        "changed": [name for name, module in trainer.model.named_modules() if "forward" in module.__dict__],
        "logged": [log.get("lowtide/recomputes") for log in trainer.state.log_history if "loss" in log],
        "wrapped": type(trainer.model_wrapped).__name__,
        "ranks": trainer.accelerator.num_processes,
    }
    if "plugins" in settings:
        report = plugin().callback.applied.report()
        found["recomputes"] = [(region.forwards, region.recomputes) for region in report.regions]
        found["kept"] = [(region.kept_outputs, region.recalled_outputs) for region in report.regions]
        found["tiles"] = [(tiled.calls, tiled.tiles) for tiled in report.tiles]
    return found


def assert_close(ours, expected):
    for name, weight in expected["weights"].items():
        torch.testing.assert_close(torch.from_numpy(ours["weights"][name]), torch.from_numpy(weight))


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_policy(ranks):
    plain = run_ranks(trained, {}, ranks=ranks)
    for ours, expected in zip(run_ranks(trained, PLUGINS | {"lowtide": "recompute"}, ranks=ranks), plain, strict=True):
        assert ours["recomputes"] == [(STEPS, STEPS)] * LAYERS
        assert ours["logged"] == [LAYERS * (step + 1) for step in range(STEPS)]
        assert ours["changed"] == [], "undone at the end"
        assert (ours["wrapped"], ours["ranks"]) == ("DistributedDataParallel", ranks)
        assert all((ours["weights"][name] == weight).all() for name, weight in expected["weights"].items())


def test_axolotls_words_are_taken_over():
    settings = {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": True},
        "tiled_mlp": True,
        "tiled_mlp_num_shards": 4,
    }
    (expected,) = run_ranks(trained, {}, ranks=1)
    (ours,) = run_ranks(trained, PLUGINS | settings, ranks=1)
    assert ours["config"]["lowtide"] == "recompute+tile(mlp, shards=4)"
    assert not ours["config"]["gradient_checkpointing"]
    assert not ours["config"]["tiled_mlp"]
    assert ours["recomputes"] == [(STEPS, STEPS)] * LAYERS
    assert [tiles / calls for calls, tiles in ours["tiles"]] == [4] * LAYERS
    assert_close(ours, expected)


@pytest.mark.parametrize("selective", [True, {"save": ["attention"], "save_sliding_window": True}])
def test_selective_checkpointing_is_taken_over(selective):
    settings = {"gradient_checkpointing": True, "selective_checkpointing": selective}
    (expected,) = run_ranks(trained, {}, ranks=1)
    (ours,) = run_ranks(trained, PLUGINS | settings, ranks=1)
    assert ours["config"]["lowtide"] == "recompute(keep=attention)"
    assert not ours["config"]["gradient_checkpointing"]
    assert not ours["config"]["selective_checkpointing"]
    assert ours["recomputes"] == ours["kept"] == [(STEPS, STEPS)] * LAYERS
    assert_close(ours, expected)


@with_backend(enable_sim)
def offloaded(rank: int, settings: dict) -> tuple:
    """As far as the trainer goes on a device that accelerate does not know: its callbacks, around a step."""
    run = axolotl_run()
    cfg = run.validated(settings)
    with tempfile.TemporaryDirectory() as folder:
        trainer = run.make_trainer(cfg, run.model(), folder)
    model = run.model().train().to("sim")
    inputs = {name: value.to("sim") for name, value in llama()[1].items()}

    def run_model():
        return model(**inputs, use_cache=False).loss

    plain = step(model, run_model)
    trainer.callback_handler.model = model
    trainer.callback_handler.on_train_begin(trainer.args, trainer.state, trainer.control)
    return cfg["lowtide"], plain, step(model, run_model), inputs["input_ids"].numel() * model.config.hidden_size * 4


def test_offload_moves_bytes():
    settings = {"gradient_checkpointing": True, "activation_offloading": "hidden_states"}
    ((policy, plain, ours, hidden),) = run_ranks(offloaded, PLUGINS | settings, ranks=1)
    assert policy == "recompute+offload"
    assert (ours.d2h - plain.d2h, ours.h2d - plain.h2d) == ((LAYERS - 1) * hidden, (LAYERS - 1) * hidden)
    ours.assert_same_gradients(plain)


def read(rank: int, settings: dict) -> str:
    return str(lowtide.Policy.parse(axolotl_run().validated(settings)["lowtide"]))


def test_a_policy_with_rules_passes_the_schema():
    block = {"recompute": True, "offload": "host", "overrides": {"*visual*": "none"}}
    assert run_ranks(read, PLUGINS | {"lowtide": block}, ranks=1) == ["recompute+offload; *visual*: none"]


def refused(rank: int, settings: dict) -> None:
    axolotl_run().validated(settings)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"lowtide": "recompute", "gradient_checkpointing": True}, "InvalidValueError.*leave one of them out"),
        ({"gradient_checkpointing": True, "activation_offloading": "disk"}, "InvalidValueError.*names no directory"),
        ({}, "InvalidValueError.*asks for nothing"),
    ],
    ids=str,
)
def test_refused_before_anything_is_loaded(settings, says):
    with pytest.raises(RankFailedError, match=says):
        run_ranks(refused, PLUGINS | settings, ranks=1)


def next_configuration(rank: int) -> list:
    """axolotl's manager keeps its plugins; the command line registers all of them again for each configuration."""
    run = axolotl_run()
    run.validated(PLUGINS | {"lowtide": "recompute"})
    cfg = run.validated({"gradient_checkpointing": True})
    plugin().register(cfg)
    with tempfile.TemporaryDirectory() as folder:
        run.make_trainer(cfg, run.model(), folder)
    return [cfg["gradient_checkpointing"], cfg.get("lowtide"), plugin().callback]


def test_a_later_configuration_without_the_plugin_is_left_alone():
    assert run_ranks(next_configuration, ranks=1) == [[True, None, None]]


def never_trained(rank: int) -> list[str]:
    run = axolotl_run()
    cfg = run.validated(PLUGINS | {"lowtide": "recompute"})
    with tempfile.TemporaryDirectory() as folder:
        trainer = run.make_trainer(cfg, run.model(), folder)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        plugin().post_train(cfg, trainer.model)
    return [str(warning.message) for warning in caught]


def test_a_policy_that_was_never_applied_is_told():
    ((said,),) = run_ranks(never_trained, ranks=1)
    assert "'lowtide: recompute' had no effect" in said
