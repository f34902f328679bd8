"""An optimizer's step in backward: the peak of real hooks, and what is refused."""

from __future__ import annotations

import pytest
import torch

from lowtide.errors import InvalidValueError
from lowtide.hardware.accelerators import Rates, find_accelerator
from lowtide.policy import Policy
from lowtide.recording import read_peak
from lowtide.simulation.attention import Attention
from lowtide.simulation.clock import DEVICE, Clock
from lowtide.simulation.device import simulated_device
from lowtide.simulation.ledger import Ledger
from lowtide.simulation.simulator import Simulator
from lowtide.simulation.step import record
from lowtide.targets.job import Job
from lowtide.targets.target import find_target
from models.planned import CONFIG, TOKENS, batch_maker, make_model
from support import needs_transformers_5
from support.real_steps import real_peak

pytestmark = [
    needs_transformers_5,
    pytest.mark.filterwarnings("ignore:Warning. Profiler clears events"),  # torch 2.12 and older say so each time
]

L40S = find_accelerator("L40S")


def _recording(family: str, policy: str, dtype: torch.dtype, *, lora: bool = False, in_backward: bool = True):
    model = make_model(family, dtype, lora=lora, device="meta")
    attention = Attention("cpu")
    ledger = Ledger(Clock(), Rates(flops=1e12, single_flops=1e12, bandwidth=1e11), DEVICE, rounding=1)
    job = Job(tokens=TOKENS, optimizer="adamw_foreach", optimizer_in_backward=in_backward)
    with simulated_device(ledger.clock, attention):
        return record(model, batch_maker(family, dtype), job, Policy.parse(policy), ledger, attention)


@pytest.mark.parametrize(
    ("family", "policy", "dtype", "lora"),
    [
        ("llama", "none", torch.float32, False),
        ("llama", "recompute", torch.bfloat16, False),
        ("qwen3", "recompute+tile(loss, loss_tokens=64)", torch.float32, False),
        ("mixtral", "recompute", torch.float32, False),
        ("llama", "recompute", torch.float32, True),
    ],
)
def test_predicted_peak_is_that_of_hooks_on_the_weights(family: str, policy: str, dtype: torch.dtype, lora: bool):
    torch.manual_seed(0)
    model = make_model(family, dtype, lora=lora, device="cpu")
    real = real_peak(model, batch_maker(family, dtype)(model, "cpu"), policy, in_backward=True)
    predicted = read_peak(_recording(family, policy, dtype, lora=lora)).nbytes
    assert predicted == pytest.approx(real, rel=0.005)


def test_few_gradients_are_there_at_once():
    after, within = (_most_gradients(in_backward=choice) for choice in (False, True))
    model = make_model("llama", torch.float32, lora=False, device="meta")
    assert after == sum(parameter.nbytes for parameter in model.parameters())
    assert within <= 2 * max(parameter.nbytes for parameter in model.parameters())


def _most_gradients(*, in_backward: bool) -> int:
    recording = _recording("llama", "recompute", torch.float32, in_backward=in_backward)
    now = most = 0
    owner: dict[int, str] = {}
    size: dict[int, int] = {}
    for event in recording.events:
        size[event.storage] = size.get(event.storage, 0) + event.change
        owner[event.storage] = event.owner.kind
        now = sum(size[number] for number, kind in owner.items() if kind == "gradients")
        most = max(most, now)
    return most


def test_sharded_gradients_go_region_by_region():
    config = {**CONFIG.to_dict(), "use_cache": False}
    target = find_target(type(CONFIG)(**config))
    after, within = (
        Simulator(target, Job(tokens=512, engine="fsdp2", ranks=4, optimizer_in_backward=choice), L40S).estimate(
            "recompute", exact=True
        )
        for choice in (False, True)
    )
    assert within.peak_bytes < after.peak_bytes
    assert within.owners.get("gradients", 0) < after.owners["gradients"] / 2


@pytest.mark.parametrize(("engine", "reason"), [("ddp", "before DDP has summed"), ("zero2", "steps after backward")])
def test_engines_that_step_after_backward_are_refused(engine: str, reason: str):
    with pytest.raises(InvalidValueError, match=rf"optimizer_in_backward with {engine} is not modelled: .*{reason}"):
        Job(tokens=8, engine=engine, ranks=2, optimizer_in_backward=True)
