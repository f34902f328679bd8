"""A training step as a plan is asked about it: everything about it except the model, the device and the policy."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from typing import Any

import torch

from lowtide.errors import InvalidValueError
from lowtide.targets.live_module import MOST_INTEGERS
from lowtide.units import parse_tokens

ENGINES = ("single", "ddp", "fsdp2", "zero1", "zero2", "zero3")

OPTIMIZERS = (
    "adamw",
    "adamw_foreach",
    "adamw8bit",
    "paged_adamw8bit",
    "adamw_offloaded",
    "adafactor",
    "muon",
    "lion",
    "sgd",
)

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

BASES = ("plain", "4bit")

TRAINERS = ("trl",)
"""Trainers that compute the loss in a way of their own."""

LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

UNITS = ("blocks", "ends")

REDUCE_BUCKET = 500_000_000
"""DeepSpeed's default of `reduce_bucket_size`."""

PARALLEL = {
    "tp": "tensor parallelism",
    "sp": "sequence parallelism",
    "cp": "context parallelism",
    "pp": "pipeline parallelism",
}
"""The ways in which ranks share one step besides the engine, which shares it by batches."""

_CHOICES = {
    "engine": ENGINES,
    "optimizer": OPTIMIZERS,
    "base": BASES,
    "dtype": tuple(DTYPES),
    "lora_dtype": tuple(DTYPES),
}


_NEAREST_ENGINE = {
    "fsdp": "say which one. Plan it with engine='fsdp2', which is the nearest of both",
    "fsdp1": (
        "its flat parameters, and how far it gathers ahead, are not counted. The nearest is engine='fsdp2', whose "
        "shards are as large"
    ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """A training step: its batch, what is trained and in which types, the optimizer, and the engine."""

    tokens: int | None = None
    """The length of each sequence; None where the model brings its own batch."""
    batch_size: int = 1
    images: tuple[int, int, int] | None = None
    """The pictures of each sequence: how many, and their height and width in pixels."""
    dtype: str | None = None
    """The type of the weights of a model that is built here; None means bf16. A live module has its own."""
    masters: bool = False
    """Whether the optimizer keeps float32 copies of 16-bit weights."""
    lora: int | None = None
    """The rank of LoRA adapters on all projections; None trains every weight."""
    lora_targets: tuple[str, ...] = LORA_TARGETS
    lora_dtype: str = "fp32"
    """The type of the adapters. PEFT makes float32 ones by default."""
    lora_dropout: float = 0.0
    """The share of numbers that each adapter's dropout drops; its masks are kept for backward."""
    base: str = "plain"
    """`4bit`: frozen linear weights take half a byte each, and are unpacked for each product."""
    double_quant: bool = False
    """Whether the scales of a 4-bit base are quantized as well: bitsandbytes' `bnb_4bit_use_double_quant`."""
    kbit: bool = False
    """Whether PEFT's `prepare_model_for_kbit_training` made the other weights of a 4-bit base float32."""
    optimizer: str = "adamw"
    """`adamw` is fused (transformers' default), `adamw_foreach` torch's default, which makes temporary copies.

    `optimizers` says what the others keep.
    """
    optimizer_in_backward: bool = False
    """Whether each weight is updated as soon as its gradient is complete, and the gradient freed at once."""
    engine: str = "single"
    reduce_dtype: str | None = None
    """The type in which FSDP2 reduces gradients; None means float32 with `masters`, else that of the gradients."""
    units: str = "blocks"
    """FSDP2's units: `blocks`, and the root for all else, or `ends`, where embeddings and head are units as well."""
    reshard: bool = True
    """Whether FSDP2 frees gathered weights after forward (`reshard_after_forward`), to gather them again."""
    reduce_bucket: int = REDUCE_BUCKET
    """The elements of ZeRO-3's buffer for gradients that are to be reduced: DeepSpeed's `reduce_bucket_size`."""
    ranks: int = 1
    """All ranks. Those that `tp` and `pp` leave have different batches, or parts of one, and `engine` joins them."""
    tp: int = 1
    """The ranks among which each layer's weights are divided, by the plan that the model's configuration brings."""
    sp: int = 1
    """The ranks among which a sequence is divided, whose attention runs head by head (Ulysses)."""
    cp: int = 1
    """The ranks among which a sequence is divided, whose attention runs on gathered keys and values."""
    pp: int = 1
    """The ranks among which the layers are divided."""
    microbatches: int | None = None
    """How many batches a pipeline takes through its stages before the optimizer's step; None means two per stage."""
    attention: str = "auto"
    trainer: str | None = None
    """`trl`: the step of TRL's SFTTrainer, whose head makes no logits. None computes the loss as the model does."""
    keep_output: bool = False
    """Whether what the model returned lives through backward, as in a loop that binds it to a name."""
    keep_gradients: bool = False
    """Whether gradients are there all the time: summed over several batches, or set to zero instead of None."""
    expandable_segments: bool = False
    """Whether torch's allocator is set to grow its segments: `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`."""

    def __post_init__(self) -> None:
        if self.engine in _NEAREST_ENGINE:
            raise InvalidValueError(f"engine {self.engine!r} is not modelled: {_NEAREST_ENGINE[self.engine]}")
        for name, known in _CHOICES.items():
            chosen = getattr(self, name)
            if chosen not in known and (name, chosen) != ("dtype", None):
                raise InvalidValueError(f"unknown {name} {chosen!r}; known: {', '.join(known)}")
        for name in ("tokens", "batch_size", "ranks", *PARALLEL, "microbatches", "reduce_bucket"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise InvalidValueError(f"{name} must be 1 or more, got {getattr(self, name)}")
        if self.trainer is not None and self.trainer not in TRAINERS:
            raise InvalidValueError(
                f"unknown trainer {self.trainer!r}; known: {', '.join(TRAINERS)}. Trainers that call the model's own "
                "loss, as transformers' Trainer does, need none"
            )
        self._check_adapters()
        self._check_parallelism()
        self._check_engine()
        self._check_engine_settings()
        check_modelled(self)

    def _check_adapters(self) -> None:
        if self.lora is not None and self.lora < 1:
            raise InvalidValueError(f"lora is the rank of the adapters: it must be 1 or more, got {self.lora}")
        if self.lora is None and (self.lora_dtype, self.lora_dropout, self.lora_targets) != (
            "fp32",
            0.0,
            LORA_TARGETS,
        ):
            raise InvalidValueError(
                "lora_dtype, lora_dropout and lora_targets are for adapters: give lora=16 (or another rank) too"
            )
        for name in ("double_quant", "kbit"):
            if getattr(self, name) and self.base != "4bit":
                raise InvalidValueError(f"{name} is about a 4-bit base: give base='4bit' too")
        if not 0 <= self.lora_dropout < 1:
            raise InvalidValueError(f"lora_dropout must be at least 0 and less than 1, got {self.lora_dropout}")

    def _check_engine_settings(self) -> None:
        if self.reduce_dtype is not None and (self.engine != "fsdp2" or self.reduce_dtype not in DTYPES):
            raise InvalidValueError(
                f"reduce_dtype={self.reduce_dtype!r} is FSDP2's (engine='fsdp2'), one of {', '.join(DTYPES)}"
            )
        if self.units not in UNITS or (self.units != "blocks" and self.engine != "fsdp2"):
            raise InvalidValueError(f"units={self.units!r} is FSDP2's (engine='fsdp2'), one of {', '.join(UNITS)}")
        if self.reduce_bucket != REDUCE_BUCKET and self.engine != "zero3":
            raise InvalidValueError("reduce_bucket is a buffer of ZeRO-3: give engine='zero3' too")
        if not self.reshard and self.engine != "fsdp2":
            raise InvalidValueError("reshard=False is FSDP2's reshard_after_forward=False: give engine='fsdp2' too")

    def _check_parallelism(self) -> None:
        if self.ranks % self.shared_by:
            asked = " x ".join(f"{name}={getattr(self, name)}" for name in PARALLEL if getattr(self, name) > 1)
            raise InvalidValueError(
                f"{self.ranks} ranks cannot be divided into groups of {asked}: {self.shared_by} each"
            )
        if self.tokens is not None and self.tokens % self.parts:
            raise InvalidValueError(
                f"{self.tokens} tokens cannot be divided into {self.parts} parts of the same length: give a multiple"
            )
        if self.tokens is not None and self.batch_size * self.tokens // self.parts > MOST_INTEGERS:
            raise InvalidValueError(
                f"a batch of {self.batch_size * self.tokens:,} tokens is more than a plan can simulate: its integers "
                f"have real values, and {MOST_INTEGERS:,} is the most"
            )
        if self.microbatches is not None and self.pp == 1:
            raise InvalidValueError("microbatches are what a pipeline takes through its stages: give pp=2 or more too")

    def _check_engine(self) -> None:
        if self.engine not in ("single", "zero3") and self.data_ranks == 1:
            rest = "" if self.ranks == 1 else f": {self.ranks} ranks leave none to share batches with"
            raise InvalidValueError(f"engine {self.engine!r} needs ranks=2 or more{rest}")
        if self.engine == "single" and self.data_ranks > 1:
            raise InvalidValueError(f"{self.data_ranks} ranks need an engine: {', '.join(ENGINES[1:])}")
        if self.base == "4bit" and self.lora is None:
            raise InvalidValueError("a 4-bit base cannot be trained itself: give lora=16 (or another rank) too")

    @property
    def built_in(self) -> torch.dtype:
        """Return the type in which a model is built here."""
        return DTYPES[self.dtype or "bf16"]

    @property
    def length(self) -> int:
        """Return the length of a rank's part of each sequence, for batches that are made from it."""
        if self.tokens is None:
            raise InvalidValueError("the model comes without a batch: give tokens=, the length of each sequence")
        return self.tokens // self.parts

    @property
    def shared_by(self) -> int:
        """Return how many ranks share one batch."""
        return math.prod(getattr(self, name) for name in PARALLEL)

    @property
    def data_ranks(self) -> int:
        """Return how many ranks have the same weights, and see different batches or different parts of one."""
        return self.ranks // (self.tp * self.pp)

    @property
    def parts(self) -> int:
        """Return into how many parts a sequence is divided."""
        return self.sp * self.cp

    @property
    def parallelism(self) -> str:
        """Describe in words how the ranks share the work: `fsdp2, tp 2`."""
        shared = [f"{name} {getattr(self, name)}" for name in PARALLEL if getattr(self, name) > 1]
        return ", ".join([*([self.engine] if self.engine != "single" else []), *shared])

    @property
    def size(self) -> str:
        """Describe the batch in words."""
        if self.tokens is None:
            return "its own batch"
        pictures = ""
        if self.images is not None:
            count, height, width = self.images
            pictures = f" with {count} image{'s' if count > 1 else ''} of {height}x{width}"
        return f"{self.batch_size} x {self.tokens} tokens{pictures}"

    @property
    def training(self) -> str:
        """Describe in words what is trained, and on what base."""
        trainer = " with TRL" if self.trainer == "trl" else ""
        if self.lora is None:
            return f"full fine-tuning{trainer}"
        where = "all projections" if self.lora_targets == LORA_TARGETS else ", ".join(self.lora_targets)
        base = f" on a 4-bit base{', prepared by PEFT' if self.kbit else ''}" if self.base == "4bit" else ""
        return f"LoRA {self.lora} ({self.lora_dtype}) in {where}{base}{trainer}"

    @property
    def shards_weights(self) -> bool:
        return self.engine in ("fsdp2", "zero3")

    @property
    def shards_gradients(self) -> bool:
        return self.engine in ("fsdp2", "zero2", "zero3")

    @property
    def shards_optimizer(self) -> bool:
        return self.engine in ("fsdp2", "zero1", "zero2", "zero3")

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


# --- What is not modelled -------------------------------------------------------------------------------------------


def check_modelled(job: Job) -> None:
    """Refuse a combination of settings whose figures would be wrong, by the name of what is not modelled."""
    for applies, combination, reason, remedy in _not_modelled(job):
        if applies:
            raise InvalidValueError(f"{combination} is not modelled: {reason}. {remedy}")


def _not_modelled(job: Job) -> list[tuple[bool, str, str, str]]:
    in_backward = "optimizer_in_backward"
    return [
        (
            job.optimizer_in_backward and job.engine == "ddp",
            f"{in_backward} with ddp",
            "a weight's hook runs before DDP has summed its gradient over the ranks",
            "Plan it with engine='fsdp2', whose hooks run after that, or with one rank",
        ),
        (
            job.optimizer_in_backward and job.engine.startswith("zero"),
            f"{in_backward} with {job.engine}",
            "DeepSpeed's own optimizer steps after backward",
            "Plan it with engine='fsdp2'",
        ),
        (
            job.keep_gradients and job.engine in ("zero1", "zero2"),
            f"keep_gradients with {job.engine}",
            "which of DeepSpeed's buffers stay between batches is not counted",
            "Plan it with engine='zero3', whose gradients have a buffer of their own, or with ddp",
        ),
        (
            job.optimizer == "muon" and job.shards_optimizer,
            f"muon with {job.engine}",
            "it needs whole matrices, which each of its sharded forms gathers in a way of its own",
            "Plan it with one rank or with ddp",
        ),
        (
            job.optimizer == "adafactor" and job.shards_optimizer,
            f"adafactor with {job.engine}",
            "its sums over rows and columns of sharded weights are not counted",
            "Plan it with one rank or with ddp, or plan adamw8bit, which keeps more",
        ),
        (
            job.optimizer in ("adafactor", "muon", "lion") and job.masters,
            f"{job.optimizer} with masters",
            "only AdamW's step on float32 masters is",
            "Plan it without masters",
        ),
        (
            job.keep_gradients and job.optimizer_in_backward,
            "keep_gradients with optimizer_in_backward",
            "a step in backward uses a gradient up at once",
            "Plan one of them",
        ),
        (
            job.base == "4bit" and job.engine == "zero3",
            "a 4-bit base with zero3",
            "it was not run, and DeepSpeed gathers weights by rules of its own",
            "Plan it with engine='fsdp2', which shards packed weights, or with ddp",
        ),
        (
            job.tp > 1 and job.lora is not None,
            "tp with adapters",
            "transformers' plans name the weights of the model alone",
            "Plan all weights, or plan adapters with engine='fsdp2'",
        ),
        (
            job.tp > 1 and job.engine.startswith("zero"),
            f"tp with {job.engine}",
            "DeepSpeed divides layers by rules of its own",
            "Plan it with engine='fsdp2'",
        ),
        (
            job.trainer == "trl" and job.shared_by > 1,
            "trainer='trl' with ranks that share a batch",
            "how TRL's head meets a weight or a sequence that is divided was never compared",
            "Plan it with engine='fsdp2', 'zero3' or 'ddp'",
        ),
        (
            job.trainer == "trl" and job.units == "ends",
            "trainer='trl' with units='ends'",
            "TRL gathers the weight of a head that is a unit of its own once more",
            "Plan it with units='blocks'",
        ),
        (
            job.trainer == "trl" and job.keep_output,
            "trainer='trl' with keep_output",
            "TRL's trainers let go of what the model returned, which has no logits",
            "Plan it without keep_output",
        ),
        (
            job.sp > 1 and job.tp > 1,
            "sp with tp",
            "Ulysses exchanges all heads, and tp leaves a rank only some",
            "Plan one of them",
        ),
        (
            job.parts > 1 and job.images is not None,
            f"{'sp' if job.sp > 1 else 'cp'} with images",
            "what exchanges tokens would take the place of the vision tower's attention too",
            "Plan text alone",
        ),
        (
            job.cp > 1 and (job.sp > 1 or job.tp > 1),
            f"cp with {'sp' if job.sp > 1 else 'tp'}",
            "their exchanges were compared with real ones one by one, and not together",
            "Plan one of them",
        ),
        *(
            (
                getattr(job, name) > 1,
                f"{name} ({PARALLEL[name]})",
                reason,
                "Plan it with sp, tp or engine='fsdp2', which divide a step as well",
            )
            for name, reason in (("pp", "the microbatches that wait in each stage are not counted"),)
        ),
    ]


# --- Settings as people write them ----------------------------------------------------------------------------------


def make_job(
    *,
    tokens: int | str | None,
    images: tuple[int, int, int] | str | None,
    engine: str | None,
    ranks: int | None,
    **settings: Any,
) -> Job:
    """Make a job from settings as people write them: `"128k"` tokens, `"4x1024x1024"` images, ranks without engine.

    Without `ranks` there are as many as share one batch.
    """
    shared_by = {name: max(settings.get(name, 1), 1) for name in PARALLEL}
    ranks = math.prod(shared_by.values()) if ranks is None else ranks
    have_same_weights = ranks // (shared_by["tp"] * shared_by["pp"])
    return Job(
        tokens=None if tokens is None else parse_tokens(tokens),
        images=parse_images(images),
        engine=engine or ("ddp" if have_same_weights > 1 else "single"),
        ranks=ranks,
        **settings,
    )


def parse_images(images: tuple[int, int, int] | str | None) -> tuple[int, int, int] | None:
    """Read pictures per sequence: `"4x1024x1024"` means four pictures of 1024 by 1024 pixels."""
    if images is None or not isinstance(images, str):
        return images
    with contextlib.suppress(ValueError):
        count, height, width = (int(part) for part in images.lower().split("x"))
        if min(count, height, width) > 0:
            return count, height, width
    raise InvalidValueError(f"cannot read pictures from {images!r}: write COUNTxHEIGHTxWIDTH, like 4x1024x1024")
