"""Short stacks carried on to the whole length, engines, and bytes of other forms of weights."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import pytest
import torch

from lowtide.hardware.accelerators import find_accelerator
from lowtide.policy.rules import joined
from lowtide.simulation import simulator
from lowtide.simulation.region_costs import region_policies
from lowtide.simulation.simulator import Simulator
from lowtide.targets.job import Job
from lowtide.targets.models import build
from lowtide.targets.target import find_target
from support import needs_transformers_5

if TYPE_CHECKING:
    from lowtide.simulation.estimate import Estimate

pytestmark = needs_transformers_5

LLAMA = {
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 10,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 8000,
    "tie_word_embeddings": False,
}
PATTERNED = {
    "model_type": "gemma3_text",
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "num_hidden_layers": 26,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "vocab_size": 4000,
    "sliding_window": 1024,
}
L40S = find_accelerator("L40S")
POLICIES = (
    "none",
    "recompute",
    "recompute+tile(loss, loss_tokens=2048)",
    "recompute+offload+tile(mlp, tokens=4096)",
    "offload",
)


def _target(config: dict[str, object]):
    import transformers

    fields = dict(config)
    return find_target(transformers.AutoConfig.for_model(fields.pop("model_type"), **fields))


def _simulator(config: dict[str, object], **job: object) -> Simulator:
    return Simulator(_target(config), Job(tokens=8192, **job), L40S)


def _estimate(policy: str = "recompute", **job: object) -> Estimate:
    return _simulator(LLAMA, **job).estimate(policy, exact=True)


@pytest.mark.parametrize("config", [LLAMA, PATTERNED], ids=["llama", "gemma3"])
@pytest.mark.parametrize("policy", POLICIES)
def test_carried_on_is_the_same_as_simulated_whole(config: dict[str, object], policy: str):
    simulator = _simulator(config)
    carried, exact = (simulator.estimate(policy, exact=whole) for whole in (False, True))
    assert (carried.exact, exact.exact) == (False, True)
    assert carried.peak_bytes == pytest.approx(exact.peak_bytes, rel=0.005)
    assert carried.seconds == pytest.approx(exact.seconds, rel=0.02)
    assert carried.host_bytes == exact.host_bytes
    if config is LLAMA:
        assert (carried.phase, carried.region) == (exact.phase, exact.region)
    assert sum(carried.owners.values()) == pytest.approx(carried.peak_bytes, rel=0.01)


def test_owners_add_up_and_the_timeline_shows_the_peak():
    estimate = _estimate("recompute+offload")
    assert sum(estimate.owners.values()) == estimate.peak_bytes
    assert sum(size for kinds in estimate.regions.values() for size in kinds.values()) == estimate.peak_bytes
    assert max(sum(point["bytes"].values()) for point in estimate.timeline) == estimate.peak_bytes
    assert estimate.timeline[0]["phase"] == "forward"
    assert estimate.timeline[-1]["phase"] == "optimizer"
    assert estimate.peak_bytes <= estimate.needed_bytes <= estimate.reserved_bytes


def test_weights_and_states_have_their_bytes():
    model = build(_target(LLAMA), Job(tokens=8))
    weights = sum(parameter.numel() for parameter in model.parameters())
    plain = _estimate().owners
    assert plain["weights"] == pytest.approx(2 * weights, rel=0.01)
    assert plain["optimizer"] == pytest.approx(4 * weights, rel=0.01)
    assert _estimate(optimizer="adamw8bit").owners["optimizer"] == pytest.approx(2 * weights, rel=0.01)
    assert "optimizer" not in _estimate(optimizer="sgd").owners
    assert _estimate(masters=True).owners["optimizer"] == pytest.approx(12 * weights, rel=0.01)
    assert _estimate(dtype="fp32").owners["weights"] == pytest.approx(4 * weights, rel=0.01)


def test_adapters_train_little_and_a_base_of_4_bits_takes_little():
    lora = _estimate(lora=8)
    assert lora.owners["optimizer"] < 0.05 * lora.owners["weights"] * 2
    small = _estimate(lora=8, base="4bit")
    assert small.owners["weights"] < 0.6 * lora.owners["weights"], "embeddings and head stay as they are"


def test_engines_share_what_they_share():
    one = _estimate().owners
    ddp = _estimate(engine="ddp", ranks=4).owners
    assert ddp["communication"] == pytest.approx(one["weights"], rel=0.01), "a bucket for every gradient"
    zero1 = _estimate(engine="zero1", ranks=4).owners
    assert zero1["optimizer"] == pytest.approx(one["optimizer"] / 4, rel=0.02)
    assert zero1["weights"] == one["weights"]
    for engine in ("fsdp2", "zero3"):
        shared = _estimate(engine=engine, ranks=4).owners
        assert shared["weights"] == pytest.approx(one["weights"] / 4, rel=0.02)
        assert shared["communication"] > 0, "gathered weights"


def test_gathering_weights_takes_time():
    slow = dataclasses.replace(L40S, network=1e9)
    job = Job(tokens=8192, engine="zero3", ranks=8)
    waits, hides = (Simulator(_target(LLAMA), job, card).estimate("recompute", exact=True) for card in (slow, L40S))
    assert waits.seconds > 2 * hides.seconds
    assert waits.peak_bytes == hides.peak_bytes


@pytest.mark.parametrize("engine", ["ddp", "zero1", "zero2", "zero3", "fsdp2"])
def test_gradients_and_new_weights_that_ranks_exchange_take_time(engine: str):
    """Where nothing hides behind compute, a step is its traffic: all but a rank's own share, in each round."""
    ranks, slow = 4, dataclasses.replace(L40S, network=1e7)
    model = build(_target(LLAMA), Job(tokens=8))
    weights = sum(parameter.nbytes for parameter in model.parameters())
    blocks = model.model.layers
    if engine == "zero3":  # the model is so small that all of it is used again soon, and stays
        traffic = 2 * weights
    elif engine == "fsdp2":  # gathered for forward, again for backward but for what stays, and reduced
        stays = weights - sum(parameter.nbytes for block in blocks[:-1] for parameter in block.parameters())
        traffic = 3 * weights - stays
    else:
        traffic = 2 * weights
    job = Job(tokens=512, engine=engine, ranks=ranks)
    policy = "none" if engine == "zero3" else "recompute"  # which would count each block once more in the distance
    waits, hides = (Simulator(_target(LLAMA), job, card).estimate(policy, exact=True) for card in (slow, L40S))
    alone = traffic * (1 - 1 / ranks) / slow.network_rate
    assert alone <= waits.seconds <= alone + hides.seconds
    assert waits.peak_bytes == hides.peak_bytes


def test_adapters_alone_are_exchanged():
    job = Job(tokens=512, lora=8, engine="ddp", ranks=2)
    slow = dataclasses.replace(L40S, network=1e6)
    simulators = [Simulator(_target(LLAMA), job, card) for card in (slow, L40S)]
    waits, hides = (simulator.estimate("recompute", exact=True) for simulator in simulators)
    alone = simulators[0].summary.trained * 4 / slow.network_rate  # float32, two rounds of one half
    assert alone <= waits.seconds <= alone + hides.seconds


def test_a_graphics_card_without_flash_takes_another_kernel():
    simulator = Simulator(
        _target({**LLAMA, "num_key_value_heads": 16}), Job(tokens=4096, dtype="fp16"), find_accelerator("T4")
    )
    assert set(simulator.estimate("recompute", exact=True).kernels) == {"efficient"}


def test_more_tokens_take_more():
    short, long = (
        Simulator(_target(LLAMA), Job(tokens=tokens), L40S).estimate("recompute", exact=False)
        for tokens in (4096, 16384)
    )
    assert long.peak_bytes > short.peak_bytes
    assert long.seconds > short.seconds
    assert torch.get_default_dtype() is torch.float32


@pytest.mark.slow
def test_a_whole_table_takes_few_operations(monkeypatch: pytest.MonkeyPatch):
    """Each policy is simulated with two short stacks, once; what the solver asks for is known by then."""
    done: list[tuple[str, int]] = []
    simulate = simulator.simulate

    def counted(*arguments: Any) -> Any:
        recording = simulate(*arguments)
        done.append((str(arguments[3]), recording.operations))
        return recording

    monkeypatch.setattr(simulator, "simulate", counted)
    asked = Simulator(find_target("Llama-3.1-8B"), Job(tokens=8192, lora=16), find_accelerator("H100"))
    policies = {tile: region_policies(tile) for tile in asked.summary.tile_options}
    for tile, chosen in policies.items():
        for policy in chosen:
            asked.estimate(joined(policy, tile), exact=False)
        asked.costs(tile, chosen)
    assert len(done) == 2 * sum(map(len, policies.values()))
    assert sum(operations for _, operations in done) <= 250_000
    assert max(operations for _, operations in done) <= 20_000, "no stack is whole"
