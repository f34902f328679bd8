"""Declares the options of `lowtide plan`, in the groups in which its help shows them."""

from __future__ import annotations

import enum
import json
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

import typer

from lowtide.cli.output import MODEL_HELP

GPUS = [row["name"] for row in json.loads((resources.files("lowtide.hardware") / "accelerators.json").read_text())]
"""The names of the table. Its own module would import torch, and help is to be shown at once."""

NOT_YET = "Not modelled yet."


class EngineName(enum.StrEnum):
    DDP = "ddp"
    FSDP1 = "fsdp1"
    FSDP2 = "fsdp2"
    ZERO1 = "zero1"
    ZERO2 = "zero2"
    ZERO3 = "zero3"


class TrainerName(enum.StrEnum):
    TRL = "trl"


def _in(panel: str) -> Any:
    """Return a function that declares an option of this group."""

    def option(*names: str, **settings: Any) -> Any:
        return typer.Option(*names, rich_help_panel=panel, **settings)

    return option


_step = _in("The step")
_device = _in("The device")
_ranks = _in("Several ranks")
_question = _in("The question")
_answer = _in("The answer")

Model = Annotated[str | None, typer.Argument(help=MODEL_HELP, metavar="MODEL", show_default=False)]

Tokens = Annotated[
    str | None,
    _step(
        metavar="N", help="Tokens per sequence: 131072 or 128k. Default: 8k; with MODULE:FACTORY, as long as its batch."
    ),
]
Lengths = Annotated[
    Path | None,
    _step(
        metavar="FILE",
        help="Plan a data set: a file with the tokens of one sequence in each line. What fits is the longest; the mean "
        "step is told, too.",
    ),
]
BatchSize = Annotated[
    int, _step(metavar="N", min=1, help="Sequences per rank, or per group of ranks that share a batch.")
]
Images = Annotated[
    str | None, _step(metavar="NxHxW", help="Pictures per sequence, and their height and width: 4x1024x1024.")
]
Lora = Annotated[int | None, _step(metavar="RANK", help="Rank of LoRA adapters. Default: full fine-tuning.")]
LoraDtype = Annotated[str, _step(metavar="TYPE", help="Type of the adapters: fp32, which is PEFT's default, or bf16.")]
LoraTargets = Annotated[
    str | None,
    _step(
        metavar="NAMES",
        help="Layers with adapters, by the ends of their names: q_proj,v_proj. Default: all seven of a block.",
    ),
]
LoraDropout = Annotated[float, _step(metavar="P", min=0, max=1, help="The adapters' dropout.", show_default=False)]
FourBit = Annotated[bool, _step("--4bit", help="The frozen base has 4-bit weights (QLoRA).")]
DoubleQuant = Annotated[bool, _step("--double-quant", help="Its scales are quantized, too: bnb_4bit_use_double_quant.")]
Kbit = Annotated[
    bool,
    _step("--kbit", help="PEFT's prepare_model_for_kbit_training made its other weights float32."),
]
Dtype = Annotated[str | None, _step(metavar="TYPE", help="Type of the weights: bf16, fp16 or fp32. Default: bf16.")]
Masters = Annotated[bool, _step("--masters", help="The optimizer keeps float32 copies of the weights.")]
Optimizer = Annotated[
    str,
    _step(
        metavar="NAME",
        help="adamw (fused), adamw_foreach, adamw8bit, paged_adamw8bit, adamw_offloaded, adafactor, muon, lion or sgd.",
    ),
]
OptimizerInBackward = Annotated[
    bool,
    _step(
        "--optimizer-in-backward",
        help="Update each weight in backward and free its gradient. Leaves no room for clipping or accumulation.",
    ),
]
Attention = Annotated[str, _step(metavar="NAME", help="auto, flash, efficient, cudnn or math.")]

Trainer = Annotated[
    TrainerName | None,
    _step(
        metavar="NAME", help="trl: the step of TRL's SFTTrainer, whose head makes no logits. No policy tiles the loss."
    ),
]
KeepGradients = Annotated[
    bool,
    _step("--keep-gradients", help="Gradients stay between steps: summed over batches, or set to zero and kept."),
]
KeepOutput = Annotated[
    bool,
    _step("--keep-output", help="The loop keeps what the model returned, logits too, until backward is over."),
]

Device = Annotated[
    str | None,
    _device(
        metavar="GPU",
        help=f"The GPU, in any spelling: {', '.join(GPUS)}. Default: this machine's.",
    ),
]
DeviceFile = Annotated[
    Path | None, _device(metavar="FILE", help="The data sheet of another GPU, as JSON; see the page about plans.")
]
ExpandableSegments = Annotated[
    bool,
    _device("--expandable-segments", help="PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True is set in training."),
]
Budget = Annotated[str | None, _device(metavar="SIZE", help="Device memory to use, e.g. 44GiB. Default: all of it.")]
Headroom = Annotated[
    str | None,
    _device(
        metavar="SHARE",
        help="How much of it recommended policies leave free, e.g. 10%, and what --longest and --largest-batch find. "
        "Default: 5%.",
    ),
]
HostBudget = Annotated[
    str | None,
    _device(metavar="SIZE", help="Host memory that offload may pin per rank. Default: twice the device's memory."),
]
Calibration = Annotated[
    Path | None, _device(metavar="FILE", help="The file that `lowtide calibrate` wrote on the GPU.")
]

Ranks = Annotated[
    int | None,
    _ranks(
        metavar="N",
        min=1,
        help="Number of processes, one per device. Default: those that share a batch by --tp, --sp, --cp and --pp.",
    ),
]
Engine = Annotated[
    EngineName | None,
    _ranks(
        metavar="NAME",
        help="How the ranks share the work: ddp, fsdp2, zero1, zero2 or zero3. Default for several ranks: ddp.",
    ),
]
Tp = Annotated[
    int, _ranks(metavar="N", min=1, help="Divide each layer's weights among N ranks, by the model's own plan.")
]
Sp = Annotated[
    int, _ranks(metavar="N", min=1, help="Divide sequences among N ranks, and attention by heads (DeepSpeed Ulysses).")
]
Cp = Annotated[
    int,
    _ranks(metavar="N", min=1, help="Divide sequences among N ranks, which gather keys and values (torch's ring)."),
]
Pp = Annotated[int, _ranks(metavar="N", min=1, help=f"Divide the layers among N ranks, in a pipeline. {NOT_YET}")]
Microbatches = Annotated[
    int | None, _ranks(metavar="N", min=1, help=f"Batches that a pipeline takes per step. {NOT_YET}")
]

ReduceDtype = Annotated[
    str | None,
    _ranks(metavar="TYPE", help="FSDP2: the type in which gradients are reduced. Default with --masters: fp32."),
]
Reshard = Annotated[
    bool, _ranks("--reshard/--no-reshard", help="FSDP2: free gathered weights after forward, or keep them.")
]
Units = Annotated[
    str, _ranks(metavar="NAME", help="FSDP2: blocks, or ends if embeddings and head are units of their own.")
]
ReduceBucket = Annotated[
    int | None, _ranks(metavar="N", min=1, help="ZeRO-3: elements of reduce_bucket_size. Default: 500000000.")
]

ThePolicy = Annotated[
    str | None,
    _question("--policy", metavar="POLICY", help="Simulate only this one, with every layer: see `lowtide policies`."),
]
Longest = Annotated[bool, _question("--longest", help="Find the longest sequence that fits, for each policy.")]
LargestBatch = Annotated[bool, _question("--largest-batch", help="Find the largest batch that fits, for each policy.")]
Exact = Annotated[bool, _question("--exact", help="Simulate every layer of every policy.")]

Serve = Annotated[
    bool, _answer("--serve", help="Open a page to plan in, on this machine: rows arrive as they are known.")
]
Port = Annotated[
    int, _answer(metavar="N", min=0, max=65535, help="Where --serve listens. Default: a free port.", show_default=False)
]
Cache = Annotated[bool, _answer("--cache/--no-cache", help="Keep results, and reuse those of earlier plans.")]
Output = Annotated[Path | None, _answer("--output", "-o", metavar="FILE", help="Write the plan to this file instead.")]
