"""Tiny Llamas with quantized weights, as bitsandbytes and torchao make them on a CPU, with adapters on their layers."""

from __future__ import annotations

import dataclasses
import tempfile
from typing import TYPE_CHECKING

import peft
import pytest
import torch
import transformers
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def plain(dtype: torch.dtype = torch.float32, **sizes: int) -> nn.Module:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES | sizes)).to(dtype)


def _loaded(config: object, dtype: torch.dtype, sizes: dict[str, int]) -> nn.Module:
    with tempfile.TemporaryDirectory() as folder:
        plain(dtype, **sizes).save_pretrained(folder)
        return load(folder, config, dtype)


def load(folder: str, config: object, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Load a model that was saved, and quantize it. Ranks load what their parent saved: only the first would save."""
    return transformers.AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype=dtype)


def nf4(dtype: torch.dtype, *, double: bool = True, storage: str = "uint8", **sizes: int) -> nn.Module:
    pytest.importorskip("bitsandbytes")
    return _loaded(nf4_config(dtype, double=double, storage=storage), dtype, sizes)


def nf4_config(dtype: torch.dtype = torch.float32, *, double: bool = True, storage: str = "uint8") -> object:
    return transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=double,
        bnb_4bit_compute_dtype=dtype,
        bnb_4bit_quant_storage=storage,
    )


def int8(dtype: torch.dtype, *, threshold: float = 6.0, **sizes: int) -> nn.Module:
    pytest.importorskip("bitsandbytes")
    config = transformers.BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=threshold)
    return _loaded(config, dtype, sizes)


def _torchao(make: Callable[[object], object]) -> Callable[[torch.dtype], nn.Module]:
    def build(dtype: torch.dtype) -> nn.Module:
        quantization = pytest.importorskip("torchao.quantization")
        return _loaded(transformers.TorchAoConfig(quant_type=make(quantization)), dtype, {})

    return build


FROZEN: dict[str, Callable[[torch.dtype], nn.Module]] = {
    "bitsandbytes nf4, double quantization": nf4,
    "bitsandbytes nf4": lambda dtype: nf4(dtype, double=False),
    "bitsandbytes int8": int8,
    "torchao int8 weights": _torchao(lambda q: q.Int8WeightOnlyConfig()),
    "torchao int4 weights": _torchao(
        lambda q: q.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=q.PerGroup(32))
    ),
    "torchao float8 weights": _torchao(lambda q: q.Float8WeightOnlyConfig()),
}
"""Formats of weights that stay as they are: adapters are trained."""


def adapted(model: nn.Module, *, dora: bool = False, prepared: bool = False, checkpointing: bool = False) -> nn.Module:
    """Put adapters on all projections, after `prepare_model_for_kbit_training` or without it."""
    if prepared:
        model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=checkpointing)
    torch.manual_seed(1)
    config = peft.LoraConfig(r=4, lora_alpha=16, target_modules=TARGETS, use_dora=dora, init_lora_weights=False)
    model = peft.get_peft_model(model, config).train()
    model.enable_input_require_grads()
    return model


def dequantized(model: nn.Module, *, dora: bool = False) -> nn.Module:
    """Return an adapted model in double precision with the values of this one's weights."""
    twin = adapted(plain(torch.double), dora=dora).double()
    parts = dict(model.named_modules())
    for name, part in twin.named_modules():
        for key, parameter in part._parameters.items():
            if parameter is not None:
                is_base = key == "weight" and isinstance(parts[name], nn.Linear) and "lora_" not in name
                values = _values(parts[name]) if is_base else parts[name]._parameters[key].data.double()
                parameter.data = values.reshape(parameter.shape)
    return twin


def _values(layer: nn.Module) -> torch.Tensor:
    weight = layer.weight
    if type(layer).__name__ == "Linear4bit":
        functional = pytest.importorskip("bitsandbytes.functional")
        return functional.dequantize_4bit(weight.data, weight.quant_state).double()
    if type(layer).__name__ == "Linear8bitLt":
        state = weight if layer.state.CB is None else layer.state
        return state.CB.double() * state.SCB.double()[:, None] / 127
    return (weight.data if type(weight) is nn.Parameter else weight.dequantize()).detach().double()


def tokens(rows: int = 2, length: int = 24) -> torch.Tensor:
    torch.manual_seed(3)
    return torch.randint(0, SIZES["vocab_size"], (rows, length))


def step(model: nn.Module, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the loss and all gradients of one step."""
    torch.manual_seed(7)
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach().clone()} | gradients


def error(ours: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Return the size of the difference of all gradients, relative to theirs."""
    assert ours.keys() == expected.keys()
    pairs = [(ours[name].double(), expected[name].double()) for name in expected if name != "loss"]
    assert len(pairs) > 1
    difference = sum((one - two).square().sum() for one, two in pairs)
    return float((difference / sum(two.square().sum() for _, two in pairs)).sqrt())


# --- Formats that train the weights themselves ---------------------------------------------------------------------


class Gated(nn.Module):
    """An MLP whose weights are trained, large enough for quantization to show."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(128, 256, bias=False) for _ in range(2))
        self.down = nn.Linear(256, 128, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


def gated(dtype: torch.dtype = torch.float32) -> Gated:
    torch.manual_seed(0)
    return Gated().to(dtype)


def in_float8(model: nn.Module, recipe: str, **changes: object) -> nn.Module:
    """Let linear layers compute in float8, which a CPU emulates."""
    float8 = pytest.importorskip("torchao.float8")
    config = dataclasses.replace(float8.Float8LinearConfig.from_recipe_name(recipe), emulate=True, **changes)
    return float8.convert_to_float8_training(model, config=config, module_filter_fn=_is_projection)


def in_int8(model: nn.Module) -> nn.Module:
    """Let linear layers compute in int8, in forward and backward."""
    training = pytest.importorskip("torchao.prototype.quantized_training")
    return _quantized(model, training.Int8MixedPrecisionTrainingConfig(module_swap=True))


def with_int8_weights(model: nn.Module) -> nn.Module:
    """Let linear layers train weights in int8."""
    training = pytest.importorskip("torchao.prototype.quantized_training")
    return _quantized(model, training.int8_weight_only_quantized_training())


def for_int4_weights(model: nn.Module) -> nn.Module:
    """Prepare weights for int4: quantization-aware training, of weights alone."""
    qat = pytest.importorskip("torchao.quantization.qat")
    weights = qat.IntxFakeQuantizeConfig(torch.int4, group_size=32)
    return _quantized(model, qat.QATConfig(weight_config=weights, step="prepare"))


def for_int8_activations(model: nn.Module) -> nn.Module:
    """Prepare for int8 activations and int4 weights: quantization-aware training of both."""
    quantization = pytest.importorskip("torchao.quantization")
    qat = pytest.importorskip("torchao.quantization.qat")
    served = quantization.Int8DynamicActivationIntxWeightConfig(
        weight_dtype=torch.int4, weight_granularity=quantization.PerGroup(32)
    )
    return _quantized(model, qat.QATConfig(served, step="prepare"))


def with_int8_activations(model: nn.Module) -> nn.Module:
    """Quantize weights, and activations as they come: for serving."""
    quantization = pytest.importorskip("torchao.quantization")
    return _quantized(model, quantization.Int8DynamicActivationInt8WeightConfig())


def _quantized(model: nn.Module, config: object) -> nn.Module:
    pytest.importorskip("torchao.quantization").quantize_(model, config, _is_projection)
    return model


def _is_projection(module: nn.Module, name: str) -> bool:
    return isinstance(module, nn.Linear) and "lm_head" not in name


def mlp_step(mlp: nn.Module, x: torch.Tensor, slope: torch.Tensor, run: Callable[..., torch.Tensor]) -> dict:
    """Return output, the gradient of the input, and those of the weights in one vector."""
    x = x.to(next(mlp.parameters()).dtype, copy=True).requires_grad_()
    mlp.zero_grad()
    out = run(mlp, x)
    out.backward(slope.to(out.dtype))
    weights = torch.cat([parameter.grad.double().flatten() for parameter in mlp.parameters()])
    return {"out": out.detach().double(), "x": x.grad.double(), "weights": weights}
