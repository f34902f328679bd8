"""The head of TRL's trainers: the simulated one against TRL's own, and what a plan offers beside it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
import transformers

import lowtide
from lowtide.errors import InvalidValueError, NoRegionError, PlanError
from lowtide.hardware.accelerators import Rates
from lowtide.policy import Policy
from lowtide.recording import read_peak
from lowtide.simulation import chunked_head
from lowtide.simulation.attention import Attention
from lowtide.simulation.clock import DEVICE, Clock
from lowtide.simulation.device import simulated_device
from lowtide.simulation.ledger import Ledger
from lowtide.simulation.step import record
from lowtide.targets.job import Job
from models.planned import TOKENS, batch_maker, make_model
from support import needs_transformers_5
from support.real_steps import real_peak

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    needs_transformers_5,
    pytest.mark.filterwarnings("ignore:Warning. Profiler clears events"),
]

SIZES = {"tokens": 256, "classes": 8192}
"""Of a chunk: so large that the head's backward is where these small models need the most."""
TINY = transformers.LlamaConfig(
    hidden_size=512, intermediate_size=1024, num_hidden_layers=2, num_attention_heads=4, vocab_size=8000
)


def fold_forward(tile, _stride, _targets, _largest, total, *_args, **_settings) -> None:
    """Stands for TRL's Triton kernel, which allocates nothing. On a CPU, torch's operators take its place."""
    total.add_(tile[:, 0])


def fold_backward(tile, *_args, **_settings) -> None:
    tile.mul_(0)


def add_product(total: torch.Tensor, left: torch.Tensor, _right: torch.Tensor) -> None:
    """Stands for CUDA's product of 16-bit factors that is added to a float32 total as it is made."""
    total.add_(left[0, 0])


@pytest.fixture
def chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both heads with chunks of one size; TRL's with kernels that allocate as little as those of a GPU."""
    utils = pytest.importorskip("trl.trainer.utils", reason="trl is not installed")
    kernels = pytest.importorskip("trl.kernels.chunked_logprob", reason="this trl has no chunked head")
    monkeypatch.setattr(chunked_head, "_TOKENS", SIZES["tokens"])
    monkeypatch.setattr(chunked_head, "_CLASSES", SIZES["classes"])
    monkeypatch.setattr(kernels, "TOKEN_CHUNK_SIZE", SIZES["tokens"])
    monkeypatch.setattr(utils, "_CHUNKED_LOGPROB_CHUNK_SIZE", SIZES["classes"])
    monkeypatch.setattr(utils, "_use_triton", lambda _device: True)
    monkeypatch.setattr(kernels, "_forward_tile", fold_forward)
    monkeypatch.setattr(kernels, "_backward_tile", fold_backward)
    monkeypatch.setattr(kernels, "_addmm_fp32", add_product)


def predicted_peak(family: str, policy: str, dtype: torch.dtype, *, lora: bool, trainer: str | None = "trl") -> int:
    model = make_model(family, dtype, lora=lora, device="meta")
    clock, attention = Clock(), Attention("cpu")
    ledger = Ledger(clock, Rates(flops=1e12, single_flops=1e12, bandwidth=1e11), DEVICE, rounding=1)
    job = Job(tokens=TOKENS, optimizer="adamw_foreach", trainer=trainer)
    with simulated_device(clock, attention):
        recording = record(model, batch_maker(family, dtype), job, Policy.parse(policy), ledger, attention)
    return read_peak(recording).nbytes


@pytest.mark.parametrize(
    ("family", "policy", "dtype", "lora"),
    [
        ("llama", "none", torch.float32, False),
        ("llama", "recompute", torch.bfloat16, False),
        ("qwen3", "recompute", torch.float32, True),
        ("qwen3", "recompute+tile(mlp, tokens=64)", torch.bfloat16, True),
        ("qwen3_vl", "recompute", torch.float32, False),
    ],
)
def test_predicted_peak_is_that_of_trls_own_head(chunks, family: str, policy: str, dtype: torch.dtype, lora: bool):
    from trl.trainer.utils import add_fused_lm_head

    torch.manual_seed(0)
    model = make_model(family, dtype, lora=lora, device="cpu")
    batch = {**batch_maker(family, dtype)(model, "cpu"), "fused_lm_head": True}
    inner = model.get_base_model() if lora else model
    add_fused_lm_head(inner, outputs=("log_probs", "entropy", "is_top1"))
    real = real_peak(model, batch, policy)
    assert predicted_peak(family, policy, dtype, lora=lora) == pytest.approx(real, rel=0.005)


def test_the_tolerance_tells_the_two_heads_apart(chunks):
    trl, whole = (predicted_peak("qwen3", "recompute", torch.float32, lora=True, trainer=t) for t in ("trl", None))
    assert abs(whole - trl) > 0.05 * trl


class TestAPlan:
    @pytest.fixture(autouse=True)
    def _plans_of_its_own(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path))

    def test_no_policy_tiles_the_loss(self):
        plan = lowtide.plan(TINY, tokens="32k", device="L40S", trainer="trl")
        with_trl = {candidate.policy: candidate for candidate in plan.candidates}
        assert not any("loss" in policy or policy.endswith("tile") for policy in with_trl)
        assert plan.summary.tile_options == ["", "tile(mlp)", "tile(attention, mlp)"]
        assert {"recompute", "recompute+tile(attention, mlp)"} <= set(with_trl)
        (usual,) = lowtide.plan(TINY, tokens="32k", device="L40S", policy="recompute").candidates
        logits = 32768 * TINY.vocab_size * 2
        assert with_trl["recompute"].device_bytes < usual.device_bytes - logits
        assert "full fine-tuning with TRL" in plan.job.training
        assert not any("cannot be seen" in note for note in plan.notes)

    @pytest.mark.parametrize("policy", ["recompute+tile(loss)", "recompute+tile"])
    def test_a_policy_that_tiles_the_loss_is_refused_with_the_one_to_use(self, policy: str):
        with pytest.raises(NoRegionError, match=r"nothing left to tile: use tile\(mlp\) without the loss"):
            lowtide.plan(TINY, tokens=1024, device="L40S", trainer="trl", policy=policy)

    @pytest.mark.parametrize(
        ("model", "settings", "error", "message"),
        [
            (TINY, {"trainer": "axolotl"}, InvalidValueError, "unknown trainer 'axolotl'; known: trl"),
            (TINY, {"tp": 2}, InvalidValueError, "trainer='trl' with ranks that share a batch is not modelled"),
            (TINY, {"ranks": 2, "engine": "fsdp2", "units": "ends"}, InvalidValueError, "with units='ends'"),
            (TINY, {"keep_output": True}, InvalidValueError, "trainer='trl' with keep_output"),
            ("t5", {}, PlanError, "it is an encoder and a decoder"),
        ],
    )
    def test_what_is_not_modelled_is_refused(self, model: object, settings: dict, error: type, message: str):
        with pytest.raises(error, match=message):
            lowtide.plan(
                model, **{"tokens": 1024, "device": "L40S", "trainer": "trl", "policy": "recompute", **settings}
            )


def test_products_are_those_of_four_passes():
    """Logits are made twice, and there are gradients of hidden states and of the weight: a product each."""
    model = transformers.LlamaForCausalLM(TINY).to("meta")
    chunked_head.give_chunked_head(model)
    ids = torch.zeros(1, 5000, dtype=torch.int64, device="meta")
    with torch.utils.flop_counter.FlopCounterMode(display=False) as flops:
        hidden = torch.empty(4999, 512, device="meta", requires_grad=True)
        found = chunked_head._Chunked.apply(hidden, model.lm_head.weight, None, ids[0, 1:])
        found[0].sum().backward()
    assert flops.get_total_flops() == 4 * 2 * 4999 * 512 * 8000
