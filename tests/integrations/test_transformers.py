"""Real trainers with a Lowtide callback: the same weights as without, and figures in every reporter."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import pytest
import torch
from accelerate import FullyShardedDataParallelPlugin
from datasets import Dataset

import lowtide
from lowtide.errors import InvalidValueError
from lowtide.integrations.transformers import LowtideCallback, attach
from models.tiny import llama, transformers
from support.foreign_warnings import ignore_warnings_of

pytestmark = ignore_warnings_of("accelerate", "datasets", "torch", "transformers", "trl")


def dataset() -> Dataset:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(1, 100, (12, 20), generator=generator).tolist()
    return Dataset.from_dict({"input_ids": rows, "labels": rows})


class Reporter(transformers.TrainerCallback):
    """Stands for W&B or TensorBoard: it sees what the trainer logs."""

    def __init__(self) -> None:
        self.seen = []

    def on_log(self, args, state, control, logs=None, **_):
        self.seen.append(dict(logs))


def trainer(folder, **options):
    torch.manual_seed(0)
    model, _ = llama()
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), max_steps=3, per_device_train_batch_size=2, gradient_accumulation_steps=2, use_cpu=True,
        logging_steps=1, report_to=[], disable_tqdm=True, seed=1,
        **{"save_strategy": "no", **options.pop("arguments", {})},
    )  # fmt: skip
    return transformers.Trainer(model, arguments, train_dataset=dataset(), **options)


def trained(one):
    one.train()
    return [p.detach().clone() for p in one.model.parameters()]


def assert_same(ours, expected):
    assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))


@pytest.mark.parametrize("own_checkpointing", [False, True])
def test_the_weights_are_those_without(tmp_path, own_checkpointing):
    expected = trained(trainer(tmp_path))
    callback = LowtideCallback("recompute")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        ours = trainer(tmp_path, callbacks=[callback], arguments={"gradient_checkpointing": own_checkpointing})
        assert_same(trained(ours), expected)
    assert (
        sum("gradient checkpointing is switched off" in str(warning.message) for warning in said) == own_checkpointing
    )
    assert all(region.recomputes == region.forwards == 6 for region in callback.applied.report().regions)
    assert all("forward" not in module.__dict__ for module in ours.model.modules()), "undone at the end"


def test_tiles_change_rounding_only(tmp_path):
    expected = trained(trainer(tmp_path))
    ours = trained(trainer(tmp_path, callbacks=[LowtideCallback("recompute+tile(tokens=16, loss_tokens=16)")]))
    for a, b in zip(ours, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


def test_apply_before_the_trainer(tmp_path):
    expected = trained(trainer(tmp_path))
    ours = trainer(tmp_path)
    applied = lowtide.apply(ours.model, "recompute")
    assert_same(trained(ours), expected)
    assert applied.report().regions[0].recomputes == 6


def test_figures_reach_reporters(tmp_path):
    reporter = Reporter()
    one = trainer(tmp_path, callbacks=[reporter])
    attach(one, "recompute")
    one.train()
    logged = [logs for logs in reporter.seen if "loss" in logs]
    assert [logs["lowtide/recomputes"] for logs in logged] == [4, 8, 12]
    assert "lowtide/saved_bytes" in logged[0]
    assert all(value for name, value in logged[0].items() if name.startswith("lowtide/")), "no zeros"
    assert "lowtide/recomputes" in one.state.log_history[0]
    with pytest.raises(InvalidValueError, match="already"):
        attach(one)


def test_a_run_resumes_under_another_policy(tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 2}
    expected = trained(trainer(tmp_path / "plain"))
    trainer(tmp_path / "run", arguments=saving, callbacks=[LowtideCallback("recompute")]).train()
    resumed = trainer(tmp_path / "run", arguments=saving, callbacks=[LowtideCallback("recompute(every=2)")])
    resumed.train(resume_from_checkpoint=str(tmp_path / "run/checkpoint-2"))
    assert_same([p.detach() for p in resumed.model.parameters()], expected)
    loaded = type(resumed.model).from_pretrained(tmp_path / "run/checkpoint-3")
    assert_same([p.detach() for p in loaded.parameters()], expected)


def test_checkpointing_of_fsdp_is_refused(tmp_path):
    one = trainer(tmp_path, callbacks=[LowtideCallback("recompute")])
    one.args.fsdp_config = {"activation_checkpointing": True}
    with pytest.raises(InvalidValueError, match="recomputed twice"):
        one.train()
    other = trainer(tmp_path)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, activation_checkpointing=True)
    other.accelerator.state = SimpleNamespace(fsdp_plugin=plugin)
    with pytest.raises(InvalidValueError, match="recomputed twice"):
        attach(other, "recompute")


def test_a_policy_is_checked_when_the_callback_is_made():
    with pytest.raises(InvalidValueError, match="did you mean 'recompute'"):
        LowtideCallback("recompote")


def test_trls_sft_trainer(tmp_path):
    """Also the oldest one that is supported; `test_trl.py` has the trainers of today."""
    trl = pytest.importorskip("trl")
    tokenizers = pytest.importorskip("tokenizers")
    words = {f"w{i}": i for i in range(126)} | {"<eos>": 126, "<pad>": 127}
    specials = {"eos_token": "<eos>", "pad_token": "<pad>"}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "w0")), **specials
    )

    def sft_trainer(*callbacks):
        torch.manual_seed(0)
        arguments = trl.SFTConfig(
            output_dir=str(tmp_path), max_steps=2, per_device_train_batch_size=2, use_cpu=True, bf16=False,
            gradient_checkpointing=False, save_strategy="no", report_to=[], disable_tqdm=True, seed=1,
        )  # fmt: skip
        return trl.SFTTrainer(
            llama()[0], arguments, train_dataset=dataset(), processing_class=tokenizer, callbacks=list(callbacks)
        )

    callback = LowtideCallback("recompute")
    assert_same(trained(sft_trainer(callback)), trained(sft_trainer()))
    assert callback.applied.report().regions[0].recomputes == 2


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # dynamo's own look at tensors
@pytest.mark.parametrize("policy", ["recompute", "recompute+tile(mlp, tokens=16)"])
def test_a_trainer_that_compiles_its_model(tmp_path, monkeypatch, policy):
    """The layers run compiled, in forward and again in backward, and the weights are those of plain training."""
    torch._dynamo.reset()
    ran = []

    def noting(graph, _inputs):
        has_attention = "scaled_dot_product_attention" in str(graph.code)

        def run(*args):
            ran.append(has_attention)
            return graph(*args)

        return run

    torch._dynamo.lookup_backend("eager")
    monkeypatch.setitem(torch._dynamo.backends.registry._COMPILER_FNS, "eager", noting)
    expected = trained(trainer(tmp_path))
    one = trainer(tmp_path, arguments={"torch_compile": True, "torch_compile_backend": "eager"})
    attach(one, policy)
    for ours, weight in zip(trained(one), expected, strict=True):
        torch.testing.assert_close(ours, weight, rtol=1e-5, atol=1e-6)
    forwards = 3 * 2 * len(one.model.model.layers)
    assert sum(ran) == 2 * forwards
