"""Runs that others measured on GPUs: what they published, where, and how to plan the same step."""

from __future__ import annotations

import dataclasses
from typing import Any

GB = 1e9 / 2**30
"""Bytes by the billion, in GiB."""

TITAN = "https://github.com/pytorch/torchtitan"
THUNDER = "https://github.com/Lightning-AI/lightning-thunder"
LITGPT = "https://github.com/Lightning-AI/litgpt"
TORCHTUNE = "https://github.com/pytorch/torchtune"
AO = "https://github.com/pytorch/ao"
DEEPSPEED = "https://github.com/deepspeedai/DeepSpeedExamples"
OTHERS = {
    "lightning": "https://github.com/Lightning-AI/pytorch-lightning/blob/master/docs/source-fabric/advanced/model_parallel/fsdp.rst",
    "transformers": "https://github.com/huggingface/transformers/blob/0016acf/docs/source/en/perf_train_gpu_one.mdx",
    "liger": "https://github.com/linkedin/Liger-Kernel#readme",
    "automodel": "https://github.com/NVIDIA-NeMo/Automodel/blob/main/docs/guides/gradient-checkpointing.mdx",
    "swift": "https://github.com/modelscope/ms-swift/blob/cfcb67265/docs/source_en/LLM/Benchmark.md",
    "peft": "https://github.com/huggingface/peft/tree/main/method_comparison/MetaMathQA/results",
    "accelerate": "https://github.com/huggingface/accelerate/tree/main/benchmarks/fsdp2",
    "forgather": "https://github.com/jdinalt/forgather/tree/a0ce917/examples/tiny_experiments/peak_memory",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """One published figure, and the plan of the same step; without a `model`, why there is none."""

    number: int
    """Its number in the list of published figures; one run may have two, allocated and reserved."""
    what: str
    source: str
    gib: float
    measured: str
    """`allocated` or `reserved`."""
    kind: str = "one GPU"
    """What shares the work: one GPU, FSDP2, DDP, ZeRO-3."""
    compiled: bool = False
    """Whether the run was compiled, and the plan is of kernels that a compiler would have fused."""
    seconds: float | None = None
    model: str = ""
    policy: str = "none"
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    why_not: str = ""
    note: str = ""
    """What is known to be different."""

    @property
    def name(self) -> str:
        return f"{self.number} {self.measured}"

    @property
    def group(self) -> str:
        return f"{self.kind}, {self.measured}{', compiled' if self.compiled else ''}"


def _factory(_name: str, **arguments: Any) -> str:
    query = "&".join(f"{key}={value}" for key, value in arguments.items())
    return f"bench.measured.models:{_name}{'?' if query else ''}{query}"


def _rate(tokens_per_second: float, tokens: int) -> float:
    return round(tokens / tokens_per_second, 4)


# --- torchtitan -----------------------------------------------------------------------------------------------------

_FSDP2 = {"engine": "fsdp2", "ranks": 8, "masters": True, "optimizer": "adamw_foreach", "device": "H100"}
_HBM2E = "H100-96GB"
"""torchtitan's machines: its logs show shares of 95.0 GiB, and its benchmark page describes that card."""
_LLAMA_2 = {"ffn": 11008, "kv": 32, "vocab": 32000, "batch": 8, "seq": 2048}
_QWEN3_32B = {"dim": 5120, "layers": 64, "heads": 64, "ffn": 25600, "vocab": 151936, "batch": 2, "seq": 4096}


_WITHOUT_EXPANDABLE_SEGMENTS = (10, 11, 43, 44)
"""Runs before torchtitan's commit a5e57e4a9, which let its launcher set them."""


def _titan(number: int, where: str, gib: float, measured: str, **more: Any) -> Run:
    """Describe a run of torchtitan's Llama 3 8B with selective checkpointing, unless `arguments` say otherwise."""
    arguments = {"selective": True, **more.pop("arguments", {})}
    expandable = number not in _WITHOUT_EXPANDABLE_SEGMENTS
    device = "H100" if where.startswith(AO) else _HBM2E
    settings = {**_FSDP2, "device": device, "expandable_segments": expandable, **more.pop("settings", {})}
    what = more.pop("what", "Llama 3 8B, 8192 tokens, selective")
    return Run(
        number=number,
        what=what,
        source=where if where.startswith("http") else f"{TITAN}/commit/{where}",
        gib=gib,
        measured=measured,
        kind="FSDP2",
        compiled="compiled" in arguments,
        model=_factory("torchtitan", **arguments),
        settings=settings,
        **more,
    )


_FULL = {"selective": False}
_FUSED_ADAM = {"optimizer": "adamw"}
_WITH_ENDS = {**_FUSED_ADAM, "units": "ends"}
_BLOCKS = {"compiled": True}
_BENCHMARK = f"{TITAN}/blob/main/benchmarks/llama3_h100_202412_torchtitan.md"

TORCHTITAN = [
    _titan(4, "6a6f755d2", 41.171, "allocated", seconds=1.55993),
    _titan(4, "6a6f755d2", 49.586, "reserved"),
    _titan(5, "5940ddeb5", 49.59, "reserved", seconds=_rate(5605, 8192)),
    _titan(
        6,
        "5940ddeb5",
        49.41,
        "reserved",
        what="Llama 3 8B, 8192 tokens, selective, every block resharded",
        seconds=_rate(5593, 8192),
    ),
    _titan(
        10,
        "40f8fd007",
        59.48,
        "reserved",
        what="Llama 3 8B, 8192 tokens, selective, logits kept",
        settings={"device": "A100-80GB", "keep_output": True},
        seconds=_rate(2615, 8192),
    ),
    _titan(
        11,
        "83c879f18",
        22.733,
        "allocated",
        what="Llama 2 7B, 8 x 2048 tokens, recompute",
        arguments={**_LLAMA_2, **_FULL},
        policy="recompute",
        settings={"keep_output": True},
        seconds=_rate(6200, 16384),
    ),
    _titan(
        11,
        "83c879f18",
        31.02,
        "reserved",
        what="Llama 2 7B, 8 x 2048 tokens, recompute",
        arguments={**_LLAMA_2, **_FULL},
        policy="recompute",
        settings={"keep_output": True},
    ),
    _titan(38, "e23bb707d", 49.58, "reserved", settings=_FUSED_ADAM, seconds=_rate(5957, 8192)),
    _titan(
        40,
        "d9bdfbb20",
        47.82,
        "reserved",
        settings=_WITH_ENDS,
        arguments={"fused_norm": True},
        seconds=_rate(7380, 8192),
    ),
    _titan(
        41,
        "d9bdfbb20",
        31.41,
        "reserved",
        what="Llama 3 8B, 8192 tokens, selective, 64 GPUs",
        settings={**_WITH_ENDS, "ranks": 64},
        arguments={"fused_norm": True},
        seconds=_rate(5097, 8192),
        note="not explained: shares of 64 ranks make 13.1 of the 16.4 GiB between this run and that on 8",
    ),
    _titan(
        45,
        f"{AO}/commit/d99785c0f",
        53.12,
        "reserved",
        what="Llama 3 8B, 4096 tokens",
        arguments={**_FULL, "seq": 4096},
        seconds=_rate(5339, 4096),
    ),
    _titan(
        47,
        f"{AO}/commit/d99785c0f",
        28.07,
        "reserved",
        what="Llama 3 8B, 4096 tokens, recompute",
        arguments={**_FULL, "seq": 4096},
        policy="recompute",
        seconds=_rate(4502, 4096),
    ),
    _titan(
        49,
        "d66b72a6a",
        89.33,
        "reserved",
        what="Qwen3 32B, 2 x 4096 tokens, recompute",
        arguments={**_FULL, **_QWEN3_32B, "fused_norm": True, "qk_norm": True},
        policy="recompute",
        settings=_WITH_ENDS,
        seconds=_rate(1614, 8192),
    ),
]

COMPILED_TORCHTITAN = [
    _titan(
        1,
        _BENCHMARK,
        77.0,
        "reserved",
        what="Llama 3 8B, 2 x 8192 tokens, selective",
        arguments={**_BLOCKS, "batch": 2},
        seconds=_rate(6667, 16384),
    ),
    _titan(
        3,
        _BENCHMARK,
        62.0,
        "reserved",
        what="Llama 3 8B, 2 x 8192 tokens, selective, 128 GPUs",
        arguments={**_BLOCKS, "batch": 2},
        settings={"ranks": 128},
        seconds=_rate(6514, 16384),
    ),
    _titan(8, "069bae286", 47.65, "reserved", arguments=_BLOCKS, seconds=_rate(5760, 8192)),
    _titan(
        9,
        f"{AO}/blob/main/docs",
        30.89,
        "reserved",
        what="Llama 3 8B, 8192 tokens, selective, compiled loss",
        arguments={**_BLOCKS, "compiled_loss": True},
        settings=_FUSED_ADAM,
        seconds=_rate(6291, 8192),
        note="not explained: a compiled loss saves 16.8 GiB against run 8, which is more than all copies of the logits",
    ),
    _titan(
        43,
        "83c879f18",
        28.72,
        "reserved",
        what="Llama 2 7B, 8 x 2048 tokens, recompute",
        arguments={**_LLAMA_2, **_FULL, **_BLOCKS},
        policy="recompute",
        settings={"keep_output": True},
        seconds=_rate(7200, 16384),
        note="not explained: here the compiled graph is the whole model",
    ),
    _titan(
        44,
        "83c879f18",
        90.28,
        "reserved",
        what="Llama 2 7B, 8 x 2048 tokens",
        arguments={**_LLAMA_2, **_FULL, **_BLOCKS},
        settings={"keep_output": True},
        seconds=_rate(9100, 16384),
    ),
    _titan(
        50,
        "d66b72a6a",
        81.85,
        "reserved",
        what="Qwen3 32B, 2 x 4096 tokens, recompute, compiled loss",
        arguments={**_FULL, **_QWEN3_32B, **_BLOCKS, "qk_norm": True, "compiled_loss": True},
        policy="recompute",
        settings=_WITH_ENDS,
        seconds=_rate(1874, 8192),
    ),
]

# --- litgpt ---------------------------------------------------------------------------------------------------------

_SEQ = 8192
_LLAMA_13B = {"dim": 5120, "heads": 40, "kv": 40, "ffn": 13824, "batch": 2, "seq": 4096, "fused": "true"}
_STABLECODE = {"dim": 2560, "ffn": 10240, "vocab": 49152, "neox": "true", "turned": 0.25, "fused": "true"}
_LLAMA_3 = {"kv": 8, "ffn": 14336, "vocab": 128256}
_MISTRAL = {"kv": 8, "ffn": 14336, "vocab": 32000, "seq": 4096, "fused": "true"}
_H100 = {"device": "H100", "keep_output": True}


def _lit(number: int, what: str, where: str, gb: float, arguments: dict[str, Any], **more: Any) -> Run:
    settings = {**_H100, **more.pop("settings", {})}
    model = _factory("litgpt", **arguments)
    return Run(
        number=number,
        what=what,
        source=where,
        gib=round(gb * GB, 3),
        measured="allocated",
        model=model,
        settings=settings,
        compiled="fused" in arguments,
        **more,
    )


_TABLES = f"{LITGPT}/blob/0cc02afa/tutorials/resource-tables.md"
_HUB = f"{LITGPT}/blob/main/config_hub/finetune/README.md"
_ON_A100 = {"device": "A100-40GB", "keep_gradients": True}
_ON_A10G = {"device": "A10G", "keep_gradients": True}
_EIGHT = {"engine": "fsdp2", "ranks": 8}

_NO_RESHARD = {**_EIGHT, "reshard": False}

LITGPT_RUNS = [
    _lit(
        13,
        "Llama 2 7B, 4096 tokens, not resharded",
        f"{THUNDER}/pull/940",
        40.21,
        {"fused": "true"},
        kind="FSDP2",
        settings=_NO_RESHARD,
        seconds=_rate(11855.92, 4096),
    ),
    *(
        _lit(
            number,
            f"StableCode 3B, {seq} tokens, not resharded",
            f"{THUNDER}/issues/1176",
            gb,
            {**_STABLECODE, "seq": seq},
            kind="FSDP2",
            settings=_NO_RESHARD,
        )
        for number, seq, gb in ((19, 16384, 62.70), (20, 8192, 35.21))
    ),
    _lit(
        60,
        "Llama 3 8B, 8192 tokens, not resharded",
        f"{THUNDER}/pull/1156",
        72.61,
        {**_LLAMA_3, "seq": _SEQ, "fused": "true"},
        kind="FSDP2",
        settings=_NO_RESHARD,
        seconds=_rate(11596.72, _SEQ),
    ),
    _lit(
        62,
        "Llama 3 8B, 8192 tokens, resharded, head and embeddings as units",
        f"{THUNDER}/pull/1156",
        56.55,
        {**_LLAMA_3, "seq": _SEQ, "fused": "true"},
        kind="FSDP2",
        settings={**_EIGHT, "units": "ends"},
        seconds=_rate(11169.12, _SEQ),
    ),
    *(
        _lit(
            number,
            f"Llama 2 13B with {layers} layers, 2 x 4096 tokens",
            f"{THUNDER}/issues/474",
            gb,
            {**_LLAMA_13B, "layers": layers},
        )
        for number, layers, gb in ((21, 2, 11.33), (22, 4, 18.35), (23, 10, 39.43), (24, 20, 74.56))
    ),
    _lit(27, "Llama 2 7B, LoRA, 1304 tokens", _TABLES, 21.30, {"seq": 1304, "rank": 8}, settings=_ON_A100),
    _lit(
        28,
        "phi-1.5, LoRA, 1044 tokens",
        _TABLES,
        4.82,
        {
            "dim": 2048,
            "layers": 24,
            "ffn": 8192,
            "vocab": 51200,
            "seq": 1044,
            "rank": 8,
            "neox": "true",
            "shared": "true",
            "turned": 0.5,
            "head_bias": "true",
        },
        settings=_ON_A100,
    ),
    _lit(79, "Llama 3 8B, LoRA, 512 tokens", _HUB, 19.73, {**_LLAMA_3, "seq": 512, "rank": 32}, settings=_ON_A10G),
    _lit(80, "Llama 2 7B, LoRA, 2 x 512 tokens", _HUB, 19.77, {"seq": 512, "batch": 2, "rank": 32}, settings=_ON_A10G),
    _lit(
        81,
        "Llama 3.2 1B, LoRA, 512 tokens",
        _HUB,
        4.49,
        {"dim": 2048, "layers": 16, "kv": 8, "ffn": 8192, "vocab": 128256, "seq": 512, "rank": 32},
        settings=_ON_A10G,
    ),
    _lit(
        82,
        "Llama 3.2 3B, LoRA, 512 tokens",
        _HUB,
        9.67,
        {"dim": 3072, "layers": 28, "heads": 24, "kv": 8, "ffn": 8192, "vocab": 128256, "seq": 512, "rank": 32},
        settings=_ON_A10G,
    ),
    *(
        _lit(
            number,
            f"Mistral 7B with {layers} layers, 4096 tokens",
            f"{THUNDER}/issues/1426",
            gb,
            {**_MISTRAL, "layers": layers},
            kind="DDP",
            settings={"engine": "ddp", "ranks": 8},
        )
        for number, layers, gb in ((67, 2, 8.18), (68, 4, 12.88), (69, 16, 41.68))
    ),
    _lit(
        61,
        "Llama 3 8B, 8192 tokens, FSDP2 with resharding",
        f"{THUNDER}/pull/1156",
        58.65,
        {**_LLAMA_3, "seq": _SEQ, "fused": "true"},
        kind="FSDP2",
        settings=_EIGHT,
        seconds=_rate(11206.86, _SEQ),
    ),
]

# --- torchtune ------------------------------------------------------------------------------------------------------

_TUNE_TABLE = f"{TORCHTUNE}/blob/1814feb17/README.md"


TORCHTUNE_RUNS = [
    Run(
        number=52,
        what="Llama 3.2 3B, 2 x 4096 tokens",
        source=_TUNE_TABLE,
        gib=60.0,
        measured="allocated",
        model=_factory("torchtune"),
        settings={"device": "A100-80GB", "optimizer": "adamw_foreach"},
        seconds=_rate(7075, 8192),
    ),
    Run(
        number=55,
        what="Llama 3.2 3B, 2 x 4096 tokens, recompute, loss in chunks",
        source=_TUNE_TABLE,
        gib=24.9,
        measured="allocated",
        compiled=True,
        model=_factory("torchtune", chunks=8),
        policy="recompute",
        settings={"device": "A100-80GB"},
    ),
    Run(
        number=56,
        what="Llama 3.2 3B, 2 x 4096 tokens, recompute, loss in chunks, optimizer in backward",
        source=_TUNE_TABLE,
        gib=23.1,
        measured="allocated",
        compiled=True,
        model=_factory("torchtune", chunks=8),
        policy="recompute",
        settings={"device": "A100-80GB", "optimizer_in_backward": True},
    ),
    Run(
        number=57,
        what="Llama 3.2 3B, 2 x 4096 tokens, recompute and offload, optimizer in backward",
        source=_TUNE_TABLE,
        gib=21.8,
        measured="allocated",
        compiled=True,
        model=_factory("torchtune", chunks=8),
        policy="recompute+offload",
        settings={"device": "A100-80GB", "optimizer_in_backward": True},
    ),
    *(
        Run(
            number=number,
            what=f"Llama 3.2 3B, {batch} x {seq} tokens{', loss in chunks' if chunks else ''}",
            source=source,
            gib=gib,
            measured="allocated",
            compiled=True,
            model=_factory("torchtune", batch=batch, seq=seq, chunks=chunks, compiled=True),
            settings={"device": "A100-80GB", "optimizer": "adamw_foreach"},
            seconds=_rate(rate, batch * seq),
            note="" if chunks else "not explained: as much as another copy of the logits in float32",
        )
        for number, batch, seq, chunks, gib, rate, source in (
            (53, 2, 4096, 0, 51.0, 8998, _TUNE_TABLE),
            (54, 2, 4096, 8, 42.9, 9174, _TUNE_TABLE),
            (93, 5, 2048, 0, 59.33, 9200, f"{TORCHTUNE}/pull/2003"),
            (94, 5, 2048, 8, 48.69, 9415, f"{TORCHTUNE}/pull/2003"),
        )
    ),
    Run(
        number=95,
        what="Llama 3.2 3B, 5 x 2048 tokens, recompute, loss in chunks",
        source=f"{TORCHTUNE}/pull/2003",
        gib=25.28,
        measured="allocated",
        compiled=True,
        model=_factory("torchtune", batch=5, seq=2048, chunks=8),
        policy="recompute",
        settings={"device": "A100-80GB"},
    ),
]

# --- DeepSpeed, Lightning -------------------------------------------------------------------------------------------

_ZERO3 = {"engine": "zero3", "ranks": 4, "device": "H100", "reduce_bucket": 50_000_000}
_LARGE = {"dim": 4096, "layers": 32, "heads": 32, "ffn": 16384, "batch": 1}
_README = f"{DEEPSPEED}/tree/516082c/training/bf16_master_weight"


def _zero3(number: int, what: str, gib: float, seconds: float, arguments: dict[str, Any], **more: Any) -> Run:
    settings = {**_ZERO3, **more.pop("settings", {})}
    return Run(
        number=number,
        what=what,
        source=_README,
        gib=gib,
        measured="allocated",
        kind="ZeRO-3",
        seconds=seconds,
        model=_factory("deepspeed_example", **arguments),
        settings=settings,
        **more,
    )


DEEPSPEED_RUNS = [
    _zero3(31, "254M, 4 x 512 tokens, 16-bit masters, one GPU", 5.73, 0.1121, {}, settings={"ranks": 1}),
    _zero3(33, "254M, 4 x 512 tokens, 16-bit masters", 4.44, 0.1249, {}),
    _zero3(34, "6.9B, 512 tokens", 41.28, 0.5078, {**_LARGE, "autocast": "false"}, settings={"masters": True}),
    _zero3(35, "6.9B, 512 tokens, 16-bit masters", 33.2, 0.5064, _LARGE),
    _zero3(
        37,
        "6.9B, 512 tokens, 16-bit masters, recompute",
        18.93,
        0.6427,
        _LARGE,
        policy="recompute",
        note="not explained: the plan's peak is in the optimizer's step",
    ),
    Run(
        number=83,
        what="Lightning's translator, 35 tokens",
        source=OTHERS["lightning"],
        gib=26.321,
        measured="allocated",
        kind="DDP",
        seconds=0.26,
        model=_factory("lightning_example"),
        settings={
            "engine": "ddp",
            "ranks": 2,
            "dtype": "fp32",
            "optimizer": "adamw_foreach",
            "device": "A100-40GB",
            "keep_output": True,
        },
        note="Adam of torch 2.0 made a second copy of the weights in its step (`denom`), which is the difference",
    ),
]

# --- Models of transformers -----------------------------------------------------------------------------------------

_FOREACH = {"optimizer": "adamw_foreach"}

TRANSFORMERS_RUNS = [
    Run(
        number=128,
        what="Llama 3.2 3B, LoRA 32, 4 x 768 tokens",
        source=OTHERS["peft"],
        gib=20.762,
        measured="reserved",
        model="Llama-3.2-3B",
        settings={
            "tokens": 768,
            "batch_size": 4,
            "lora": 32,
            "lora_targets": ("q_proj", "v_proj"),
            "device": "L40S",
            "keep_output": True,
            **_FOREACH,
        },
    ),
    Run(
        number=131,
        what="Llama 3.2 3B, 4 x 768 tokens",
        source=OTHERS["peft"],
        gib=36.199,
        measured="reserved",
        model="Llama-3.2-3B",
        settings={"tokens": 768, "batch_size": 4, "device": "L40S", "keep_output": True, **_FOREACH},
        note="not explained: its batches are of many lengths, and a plan is of one",
    ),
    Run(
        number=132,
        note="read from a plot of samples over time, which miss the peak",
        what="Qwen2.5 1.5B, 2 x 128 tokens",
        source=OTHERS["accelerate"],
        gib=4.248,
        measured="allocated",
        kind="FSDP2",
        model="bench.measured.models:qwen2",
        settings={"tokens": 128, "batch_size": 2, "keep_output": True, **_FSDP2, "reduce_dtype": "bf16"},
    ),
    *(
        Run(
            number=number,
            what=f"BERT large, {batch} x 512 tokens{', recompute' if policy != 'none' else ''}",
            source=OTHERS["transformers"],
            gib=round((mib - 1343) / 1024, 3),
            measured="reserved",
            seconds=round(batch / rate, 4),
            model=_factory("bert_large", batch=batch),
            policy=policy,
            settings={"dtype": "fp32", "device": "V100-16GB", "keep_output": True, "keep_gradients": True},
            note="not explained: it is what the driver showed, less what it showed before the run" if batch > 1 else "",
        )
        for number, batch, mib, rate, policy in (
            (88, 4, 14949, 8.86, "none"),
            (89, 1, 8681, 7.75, "none"),
            (90, 1, 6775, 5.99, "recompute"),
        )
    ),
]

# --- What cannot be planned -----------------------------------------------------------------------------------------

_UNSAID = "which settings were on is not said"
_FSDP1 = "FSDP1: its flat parameters are not modelled. The nearest is engine='fsdp2'"


def _not(numbers: dict[int, float], what: str, source: str, measured: str, why_not: str, **more: Any) -> list[Run]:
    return [
        Run(number=number, what=what, source=source, gib=gib, measured=measured, why_not=why_not, **more)
        for number, gib in numbers.items()
    ]


_OLD_RUNS = f"{TITAN}/commit/83c879f18"
_FORGATHER = OTHERS["forgather"]

NOT_PLANNED = [
    *_not({58: 8.5}, "Llama 3.2 3B, LoRA, 2 x 4096 tokens", _TUNE_TABLE, "allocated", _UNSAID),
    *_not(
        {96: 18.9, 97: 16.2, 98: 30.3},
        "Llama 3.1 8B, 2 x 2048 tokens",
        f"{TORCHTUNE}/pull/1664",
        "allocated",
        _UNSAID,
    ),
    *_not({42: 23.579}, "Llama 2 7B, 8 x 2048 tokens", _OLD_RUNS, "allocated", _FSDP1),
    *_not({59: 37.448}, "Llama 2 7B, 4096 tokens", f"{THUNDER}/pull/940", "allocated", _FSDP1),
    *_not(
        {63: 5.839, 64: 9.267, 65: 19.558, 66: 36.703},
        "Llama 2 13B, 2 to 20 layers",
        f"{THUNDER}/issues/474",
        "allocated",
        _FSDP1,
    ),
    *_not(
        {70: 45.253, 71: 47.311, 72: 60.191, 73: 47.497},
        "four models, long sequences",
        f"{THUNDER}/pull/1261",
        "allocated",
        _FSDP1,
    ),
    *_not({77: 20.657, 78: 21.784}, "Llama 2 7B, LoRA, 1304 tokens", _TABLES, "allocated", _FSDP1),
    *_not({86: 11.307, 87: 2.759}, "Lightning's translator", OTHERS["lightning"], "allocated", _FSDP1),
    *_not(
        {108: 35.746, 109: 59.331, 110: 19.163, 111: 22.848, 112: 29.85, 113: 46.801, 114: 75.177},
        "Llama 3 8B, 8 x 1024 to 16384 tokens",
        OTHERS["liger"],
        "reserved",
        _FSDP1,
    ),
    *_not(
        {91: 49.544},
        "Llama 2 7B, 8 x 2048 tokens",
        _OLD_RUNS,
        "allocated",
        "which selective checkpointing was on is not said",
    ),
    *_not(
        {
            99: 21.165,
            100: 12.529,
            101: 19.712,
            102: 21.164,
            103: 7.425,
            104: 12.418,
            105: 3.975,
            106: 13.561,
            107: 15.636,
        },
        "1.6B, 4 x 768 tokens",
        _FORGATHER,
        "allocated",
        "an Adafactor and layers of their own",
    ),
    *_not(
        {115: 53.03, 116: 47.59, 117: 33.06, 118: 7.3},
        "Llama 3.2 1B, 8 x 2048 tokens",
        OTHERS["automodel"],
        "allocated",
        "types, attention and whether it was compiled are not said",
    ),
    *_not(
        {119: 27.74, 120: 37.7, 121: 27.71, 122: 57.67, 123: 43.11, 124: 63.81, 125: 48.41, 126: 43.81, 127: 74.26},
        "Qwen 7B and Yi 6B",
        OTHERS["swift"],
        "reserved",
        "sequences of many lengths, and code from the Hub",
    ),
]

COMPILED_PAIRS = (("8 reserved", "5 reserved"), ("43 reserved", "11 reserved"), ("50 reserved", "49 reserved"))
COMPILED_PAIRS += (("53 allocated", "52 allocated"),)
"""Published runs that were compiled, and the same runs without that."""

RUNS = [*TORCHTITAN, *COMPILED_TORCHTITAN, *LITGPT_RUNS, *TORCHTUNE_RUNS, *DEEPSPEED_RUNS, *TRANSFORMERS_RUNS]
