"""TRL's trainers with a Lowtide callback: the gradients of their steps are those without, or the policy is refused.

The trainers differ in what they do around a step: a reference model beside the policy (a second model, one that shares
layers with it, or the same with its adapters off), generation between steps, forwards without gradients before a
backward, packed and masked rows. The tiny models have large weights, so that attention and caches matter.
"""

from __future__ import annotations

import atexit
import functools
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch.utils._python_dispatch import TorchDispatchMode

import lowtide
from lowtide.applying.seam import Seam
from lowtide.errors import NoRegionError, SilentNoOpError
from lowtide.integrations.transformers import LowtideCallback, attach
from models.tiny import transformers
from support.foreign_warnings import ignore_warnings_of

trl = pytest.importorskip("trl", minversion="1.16")
peft = pytest.importorskip("peft")
tokenizers = pytest.importorskip("tokenizers")

pytestmark = [
    ignore_warnings_of("accelerate", "datasets", "peft", "torch", "transformers", "trl"),
    pytest.mark.filterwarnings("ignore:.label_smoothing_factor. is deprecated:FutureWarning"),
]

EXACT = "recompute"
TILED = "recompute+tile(mlp, tokens=4)"
BLOCKS = "tile(attention, mlp, tokens=4)"
TOLERANCE = 1e-4
"""Of a gradient's norm in single precision: tiles add in a different order, and a second step starts from the first."""


BF16_TOLERANCE = 2**-7
"""Of adapters on 4 bits: TRL makes them bfloat16, whose numbers are 2**-8 apart, relatively."""


def llama(kind: str = "LlamaForCausalLM", *, seed: int = 0, **settings: Any) -> Any:
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.2, bos_token_id=125, eos_token_id=126, pad_token_id=127, **settings,
    )  # fmt: skip
    return getattr(transformers, kind)(config)


def tokenizer() -> Any:
    words = {f"w{index}": index for index in range(126)} | {"<eos>": 126, "<pad>": 127}
    words_of = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "w0"))
    words_of.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    specials = {"eos_token": "<eos>", "pad_token": "<pad>"}
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=words_of, **specials)
    made.chat_template = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ 'w1 ' + m.content + ' w2 ' }}{% else %}"
        "{% generation %}{{ m.content.strip() + ' <eos> ' }}{% endgeneration %}{% endif %}{% endfor %}"
    )
    return made


def rows(**lengths: int) -> Dataset:
    """Eight rows with a text of so many words in each column."""
    generator = torch.Generator().manual_seed(0)

    def text(length: int) -> str:
        return " " + " ".join(f"w{word}" for word in torch.randint(3, 100, (length,), generator=generator).tolist())

    return Dataset.from_list([{column: text(length) for column, length in lengths.items()} for _ in range(8)])


def chats() -> Dataset:
    turns = rows(user=5, assistant=9)
    return Dataset.from_list(
        [{"messages": [{"role": role, "content": text} for role, text in turn.items()] * 2} for turn in turns]
    )


def labelled() -> Dataset:
    return rows(prompt=5, completion=12).add_column("label", [True, False] * 4)


def reward(completions: list[str], **_: Any) -> list[float]:
    return [float(sum(map(ord, text)) % 7) for text in completions]


def saved(model: Any) -> Any:
    """The same model, with its weights in a folder, from which trainers read a reference of their own."""
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder)
    model.save_pretrained(folder)
    return type(model).from_pretrained(folder)


def in_four_bits(model: Any) -> Any:
    """The same model with weights in NF4, as bitsandbytes trains them on a CPU."""
    pytest.importorskip("bitsandbytes")
    config = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
    )
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return type(model).from_pretrained(folder, quantization_config=config, dtype=torch.float32)


def with_shared_layer(model: Any) -> dict[str, Any]:
    """A frozen reference that shares its first layer with the policy."""
    model.model.layers[0].requires_grad_(False)
    reference = llama()
    reference.model.layers[0] = model.model.layers[0]
    return {"ref_model": reference}


PREFERENCES = functools.partial(rows, prompt=5, chosen=12, rejected=9)
PROMPTS = functools.partial(rows, prompt=5)
REFERENCE = {"more": lambda _: {"ref_model": llama()}}
TEACHER = {"more": lambda _: {"teacher_model": llama(seed=1)}}
REWARDS = {"more": lambda _: {"reward_funcs": reward}}
GENERATES = {"data": PROMPTS, "num_generations": 2, "max_completion_length": 6, "max_steps": 2} | REWARDS

CASES: dict[str, dict[str, Any]] = {
    "SFT": {"data": functools.partial(rows, text=17)},
    "SFT with label smoothing": {
        "data": functools.partial(rows, prompt=5, completion=12),
        "label_smoothing_factor": 0.1,
    },
    "SFT packed": {"data": functools.partial(rows, text=13), "packing": True, "max_length": 32},
    "SFT without padding": {"data": functools.partial(rows, text=13), "padding_free": True, "max_length": None},
    "SFT of assistants": {"data": chats, "assistant_only_loss": True, "peft": True},
    "SFT on 4 bits": {"data": functools.partial(rows, text=17), "make": in_four_bits, "peft": True},
    "DPO": {"data": PREFERENCES} | REFERENCE,
    "DPO with log-probabilities of before": {"data": PREFERENCES, "precompute_ref_log_probs": True},
    "DPO on 4 bits": {"data": PREFERENCES, "make": in_four_bits, "peft": True},
    "DPO with a shared layer": {"data": PREFERENCES, "more": with_shared_layer},
    "DPO with adapters": {"data": PREFERENCES, "peft": True, "gradient_accumulation_steps": 2},
    "KTO": {"data": labelled} | REFERENCE,
    "KTO with adapters": {"data": labelled, "peft": True},
    "GRPO": GENERATES | {"num_iterations": 2, "gradient_accumulation_steps": 2},
    "GRPO with a reference": GENERATES | {"beta": 0.1, "make": saved, "max_steps": 1},
    "GRPO with adapters": GENERATES | {"beta": 0.1, "peft": True},
    "RLOO": GENERATES | {"beta": 0.0, "max_steps": 1},
    "RLOO with a reference": GENERATES | {"beta": 0.1, "make": saved, "max_steps": 1},
    "RLOO with adapters": GENERATES | {"beta": 0.1, "peft": True},
    "Distillation": {"data": PROMPTS, "max_completion_length": 6} | TEACHER,
    "Distillation with adapters": {"data": PROMPTS, "max_completion_length": 6, "peft": True} | TEACHER,
    "Reward": {"data": functools.partial(rows, chosen=14, rejected=11)},
    "Reward with adapters": {"data": functools.partial(rows, chosen=14, rejected=11), "peft": True},
}


class Gradients(transformers.TrainerCallback):
    """Notes all gradients just before each optimizer step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, torch.Tensor]] = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **_):
        named = model.named_parameters()
        self.steps.append({name: p.grad.clone() for name, p in named if p.grad is not None})


def trainer(case: str, folder: Any, *callbacks: Any, before: str | None = None, **changes: Any) -> Any:
    settings = {"peft": False, "more": lambda _: {}, "make": lambda model: model} | CASES[case] | changes
    data, has_adapters, more, make = (settings.pop(name) for name in ("data", "peft", "more", "make"))
    kind = case.split(maxsplit=1)[0]
    is_reward = kind == "Reward"
    model = llama("LlamaForSequenceClassification", num_labels=1) if is_reward else make(llama())
    if before is not None:
        lowtide.apply(model, before)
    arguments = {
        "output_dir": str(folder), "max_steps": 1, "per_device_train_batch_size": 4, "use_cpu": True, "bf16": False,
        "save_strategy": "no", "report_to": [], "disable_tqdm": True, "seed": 1, "gradient_checkpointing": False,
        "logging_steps": 1, "learning_rate": 1e-3,
    }  # fmt: skip
    lora = peft.LoraConfig(
        r=4, target_modules=["q_proj", "v_proj", "down_proj"], task_type="SEQ_CLS" if is_reward else "CAUSAL_LM",
        init_lora_weights=False,
    )  # fmt: skip
    return getattr(trl, f"{kind}Trainer")(
        model, args=getattr(trl, f"{kind}Config")(**(arguments | settings)), train_dataset=data(),
        processing_class=tokenizer(), callbacks=list(callbacks), peft_config=lora if has_adapters else None,
        **more(model),
    )  # fmt: skip


@functools.cache
def plain(case: str) -> list[dict[str, torch.Tensor]]:
    gradients = Gradients()
    with tempfile.TemporaryDirectory() as folder:
        trainer(case, folder, gradients).train()
    return gradients.steps


def error(ours: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    assert ours.keys() == expected.keys()
    return max(float((ours[name] - grad).norm() / grad.norm()) for name, grad in expected.items() if grad.any())


FAST = {
    ("SFT packed", EXACT),
    ("DPO with a shared layer", EXACT),
    ("KTO with adapters", TILED),
    ("GRPO with adapters", BLOCKS),
}
"""What `make test` runs; the rest is slow."""
RUNS = [
    pytest.param(case, policy, marks=[] if (case, policy) in FAST else pytest.mark.slow)
    for case in CASES
    for policy in (EXACT, TILED, BLOCKS)
]


@pytest.mark.parametrize(("case", "policy"), RUNS)
def test_gradients_are_those_without(case, policy, tmp_path):
    gradients, callback = Gradients(), LowtideCallback(policy)
    trainer(case, tmp_path, callback, gradients).train()
    errors = [error(ours, expected) for ours, expected in zip(gradients.steps, plain(case), strict=True)]
    tolerance = BF16_TOLERANCE if "4 bits" in case else TOLERANCE
    assert errors == [0] * len(errors) if policy == EXACT else max(errors) < tolerance
    report = callback.applied.report()
    if policy != BLOCKS:
        backwards = len(errors) * CASES[case].get("gradient_accumulation_steps", 1)
        trained = report.regions[1:] if "shared" in case else report.regions  # the layer at the bottom is frozen
        assert [region.recomputes for region in trained] == [backwards] * len(trained)
    if policy != EXACT:
        assert sum(tiles.tiles for tiles in report.tiles) > sum(tiles.calls for tiles in report.tiles) > 0


OFFLOADED = [
    "KTO with adapters",
    *(pytest.param(case, marks=pytest.mark.slow) for case in CASES if "KTO w" not in case),
]


@pytest.mark.parametrize("case", OFFLOADED)
def test_offload_to_disk(case, tmp_path):
    gradients, callback = Gradients(), LowtideCallback(f"recompute+offload(disk={tmp_path}, tmpfs)")
    trainer(case, tmp_path, callback, gradients).train()
    assert {error(ours, expected) for ours, expected in zip(gradients.steps, plain(case), strict=True)} == {0}
    *others, _ = callback.applied.report().regions  # the last one's input is needed at once
    if "shared" not in case:  # there, the first of the two is frozen
        assert all(region.packed_bytes > 0 for region in others)


def test_the_page_says_how_many_cases_there_are():
    page = Path(__file__).parents[2] / "docs" / "frameworks" / "trl.md"
    assert re.search(r"In each of the\s+(\d+) cases below", page.read_text())[1] == str(len(CASES))


@pytest.mark.parametrize("policy", ["tile(loss)", "recompute+tile"])
@pytest.mark.parametrize("case", ["SFT", pytest.param("DPO with adapters", marks=pytest.mark.slow), "Reward"])
def test_tiles_of_the_loss_are_refused_before_training(case, policy, tmp_path):
    """TRL's own head is in tiles already; a reward model has none."""
    says = r"tile\(loss\): .*use tile\(mlp\) without the loss"
    with pytest.raises(NoRegionError, match=says):
        attach(trainer(case, tmp_path), policy)
    one = trainer(case, tmp_path, LowtideCallback(policy))
    with pytest.raises(NoRegionError, match=says):
        one.train()
    assert one.state.global_step == 0
    assert all(not isinstance(getattr(module, "forward", None), Seam) for module in one.model.modules())


@pytest.mark.parametrize("case", ["Distillation", pytest.param("Distillation with adapters", marks=pytest.mark.slow)])
def test_tiles_of_the_loss_are_refused_for_distillation(case, tmp_path):
    """Its model shows nothing of it: the trainer calls the backbone, and takes the weights of both heads."""
    says = r"tile\(loss\): TRL's DistillationTrainer .* use tile\(mlp\) without the loss, like 'recompute\+tile\(mlp\)'"
    with pytest.raises(NoRegionError, match=says):
        attach(trainer(case, tmp_path), "recompute+tile(mlp, loss)")
    one = trainer(case, tmp_path, LowtideCallback("recompute+tile(loss)"))
    with pytest.raises(NoRegionError, match=says):
        one.train()
    assert one.state.global_step == 0


def test_the_policy_that_a_refusal_names_works(tmp_path):
    one = trainer("SFT", tmp_path)
    with pytest.raises(NoRegionError, match=r"like 'recompute\+tile\(attention, mlp\)'"):
        attach(one, "recompute+tile")
    callback = attach(one, "recompute+tile(attention, mlp)")
    one.train()
    assert [region.recomputes for region in callback.applied.report().regions] == [1, 1]


def test_a_policy_that_was_applied_before_the_trainer(tmp_path):
    """TRL puts its forward around ours: `tile(loss)` is found to do nothing, and the guard says so."""
    says = "computes its loss from different logits, as TRL's trainers do"
    one = trainer("SFT", tmp_path, before="recompute+tile(loss)")
    with pytest.raises(SilentNoOpError, match=says):
        one.train()


SELECTIVE = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"selective": True}}


class Attention(TorchDispatchMode):
    """Counts how often attention is computed."""

    computed = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func)
        self.computed += "attention" in name and "backward" not in name
        return func(*args, **(kwargs or {}))


def trained(one):
    one.train()
    return [p.detach().clone() for p in one.model.parameters()]


def assert_same(ours, expected):
    assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))


def counted(one):
    """Train, and return the weights, how often attention was computed, and how often each layer's MLP ran."""
    runs = []
    for layer in one.model.model.layers:
        layer.mlp.register_forward_pre_hook(lambda mlp, _: runs.append(mlp))
    with Attention() as attention:
        weights = trained(one)
    return weights, attention.computed, [runs.count(layer.mlp) for layer in one.model.model.layers]


def test_trls_selective_mode_is_one_engine_with_a_policy(tmp_path):
    """TRL's alone keeps attention and runs the rest twice; so does ours, with theirs switched off."""
    weights, attention, runs = counted(trainer("SFT", tmp_path))
    layers, steps = len(runs), 1
    assert (attention, runs) == (steps * layers, [steps] * layers)
    _, attention, runs = counted(trainer("SFT", tmp_path, **SELECTIVE))
    assert (attention, runs) == (steps * layers, [2 * steps] * layers)

    callback = LowtideCallback(SELECTIVE)
    one = trainer("SFT", tmp_path, callback, **SELECTIVE)
    with pytest.warns(UserWarning, match="own gradient checkpointing is switched off") as caught:
        ours, attention, runs = counted(one)
    assert not [w for w in caught if "selective" in str(w.message)], "the policy has it"
    assert_same(ours, weights)
    assert (attention, runs) == (steps * layers, [2 * steps] * layers)
    assert [
        (region.policy, region.recomputes, region.kept_outputs, region.recalled_outputs)
        for region in callback.applied.report().regions
    ] == [("recompute(keep=attention)", steps, steps, steps)] * layers


@pytest.mark.filterwarnings("ignore:lowtide. the model's own gradient checkpointing")
def test_trls_selective_mode_beside_a_policy_that_keeps_nothing(tmp_path):
    one = trainer("SFT", tmp_path, LowtideCallback("recompute"), **SELECTIVE)
    with pytest.warns(UserWarning, match=r"'selective': True} is switched off .* write recompute\(keep=attention\)"):
        _, attention, runs = counted(one)
    assert (attention, runs) == (2 * len(runs), [2] * len(runs)), "recomputed, once"


def test_trls_selective_mode_around_a_policy_is_told(tmp_path):
    """A policy that was applied before the trainer switches its own on: every layer is in a checkpoint already."""
    one = trainer("SFT", tmp_path, **SELECTIVE)
    says = "inside another checkpoint, so it is recomputed twice, and attention is not kept: switch that off"
    with lowtide.apply(one.model, "recompute(keep=attention)"), pytest.warns(UserWarning, match=says):
        one.train()
