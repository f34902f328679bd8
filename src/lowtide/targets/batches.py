"""Makes a batch of the planned size from a model's configuration, or puts a given one on the simulated device.

Token numbers have real values, because masks and routers look at them; pictures are meta tensors.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch

from lowtide._torch import pytree
from lowtide.errors import PlanError

if TYPE_CHECKING:
    from torch import nn

    from lowtide.targets.job import Job

_IMAGE_TOKENS = ("image_token_id", "image_token_index")

SEQUENCE_CLASSIFIER = "ForSequenceClassification"
CLASSIFIERS = (SEQUENCE_CLASSIFIER, "ForTokenClassification")
"""The endings of classes whose labels are classes, not tokens."""

_RESERVED = 16
"""How many of the lowest token numbers are left out: tokenizers give them a special meaning."""


def make_batch(model: nn.Module, job: Job, device: torch.device) -> dict[str, Any]:
    """Make the arguments of the model's forward: full sequences with labels, and pictures if the job has them."""
    config = getattr(model, "config", None)
    if config is None:
        raise PlanError(no_batch(model))
    if job.images is not None:
        return _batch_with_pictures(model, config, job, device)
    batch = _text_batch(_token_ids(config, job, device), model)
    return batch if job.parts == 1 else _part_of_sequence(batch)


def _part_of_sequence(batch: dict[str, Any]) -> dict[str, Any]:
    """Return the batch of a rank with a part of each sequence: it is told its tokens' positions, and has no mask."""
    ids = batch["input_ids"]
    positions = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape).contiguous()
    return {"input_ids": ids, "labels": batch["labels"], "position_ids": positions}


def no_batch(model: nn.Module) -> str:
    """Say why no batch can be made for a model, and how to give one."""
    return (
        f"{type(model).__name__} has no configuration (model.config, as transformers' models have) that tells what its "
        "batches look like: give batch=, or a factory that returns (model, batch)"
    )


def put_on(device: torch.device, batch: Any) -> Any:
    """Put a given batch on the simulated device. Tensors without values are created again for each step."""
    return pytree.tree_map_only(
        torch.Tensor, lambda t: t.detach().clone() if t.is_meta else t.detach().to(device), batch
    )


def _text_batch(ids: torch.Tensor, model: nn.Module) -> dict[str, Any]:
    batch = {"input_ids": ids, "labels": _labels(ids, model), "attention_mask": torch.ones_like(ids)}
    names = inspect.signature(_without_adapters(model).forward).parameters
    return batch if "attention_mask" in names else {name: batch[name] for name in ("input_ids", "labels")}


def _labels(ids: torch.Tensor, model: nn.Module) -> torch.Tensor:
    """Return a class for each sequence or token that a classifier labels, else the tokens themselves."""
    name = type(_without_adapters(model)).__name__
    if name.endswith(SEQUENCE_CLASSIFIER):
        return torch.zeros_like(ids[:, 0])
    return torch.zeros_like(ids) if name.endswith(CLASSIFIERS) else ids.clone()


def _token_ids(config: Any, job: Job, device: torch.device) -> torch.Tensor:
    vocabulary = _text_config(config).vocab_size
    shape = (job.batch_size, job.length)
    special = [getattr(config, name, None) for name in (*_IMAGE_TOKENS, "video_token_id", "audio_token_id")]
    high = min([vocabulary, *(token for token in special if isinstance(token, int) and token > _RESERVED)])
    low = min(_RESERVED, high - 1)
    return torch.arange(job.batch_size * job.length, device=device).remainder(high - low).add(low).reshape(shape)


def _text_config(config: Any) -> Any:
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _batch_with_pictures(model: nn.Module, config: Any, job: Job, device: torch.device) -> dict[str, Any]:
    token = next(
        (getattr(config, name) for name in _IMAGE_TOKENS if isinstance(getattr(config, name, None), int)), None
    )
    names = inspect.signature(_without_adapters(model).forward).parameters
    if token is None or "pixel_values" not in names:
        raise PlanError(f"{config.model_type} takes no pictures: leave images out")
    pictures = _patches(config, job, device) if "image_grid_thw" in names else _images(config, job, device)
    slices = _picture_slices(_count_picture_tokens(model, pictures, job), job)
    ids = _token_ids(config, job, device)
    kinds = torch.zeros_like(ids)
    for part in slices:
        ids[:, part] = token
        kinds[:, part] = 1
    batch = {**_text_batch(ids, model), **pictures}
    return {**batch, "mm_token_type_ids": kinds} if "mm_token_type_ids" in names else batch


def _picture_slices(count: int, job: Job) -> list[slice]:
    """Return where the pictures of a sequence lie: one after the other, with a token of text before each."""
    pictures = job.images[0]  # type: ignore[index]
    each = count // pictures
    if count + pictures >= job.length:
        raise PlanError(
            f"the pictures of one sequence take {count} of its {job.length} tokens: plan for fewer or smaller "
            "pictures, or for more tokens"
        )
    return [slice(number * (each + 1) + 1, (number + 1) * (each + 1)) for number in range(pictures)]


def _patches(config: Any, job: Job, device: torch.device) -> dict[str, torch.Tensor]:
    """Make pictures as Qwen-VL takes them: all patches of all pictures as rows, and the grid of each picture."""
    vision = config.vision_config
    patch, merge = vision.patch_size, vision.spatial_merge_size
    count, height, width = job.images  # type: ignore[misc]  # the job has pictures
    rows, columns = (round(size / (patch * merge)) * merge for size in (height, width))
    if not rows or not columns:
        raise PlanError(f"pictures of {height}x{width} are smaller than a patch of {patch * merge}x{patch * merge}")
    channels: int = getattr(vision, "in_channels" if hasattr(vision, "in_channels") else "in_chans")
    numbers = channels * getattr(vision, "temporal_patch_size", 1) * patch * patch
    dtype = torch.get_default_dtype()
    total = job.batch_size * count
    return {
        "pixel_values": torch.empty(total * rows * columns, numbers, dtype=dtype, device=device),
        "image_grid_thw": torch.tensor([[1, rows, columns]] * total, device=device),
    }


def _images(config: Any, job: Job, device: torch.device) -> dict[str, torch.Tensor]:
    """Make pictures of the one size that the vision tower takes: a processor scales every picture to it."""
    vision = config.vision_config
    size = vision.image_size
    height, width = (size, size) if isinstance(size, int) else size
    channels = getattr(vision, "num_channels", 3)
    count = job.images[0]  # type: ignore[index]
    return {"pixel_values": torch.empty(job.batch_size * count, channels, height, width, device=device)}


def _count_picture_tokens(model: nn.Module, pictures: dict[str, torch.Tensor], job: Job) -> int:
    """Ask the vision tower how many tokens the pictures of one sequence become: towers merge and pool differently."""
    base = _without_adapters(model)
    owner = next((part for part in base.modules() if hasattr(part, "get_image_features")), None)
    if owner is None:
        raise PlanError(f"{type(base).__name__} has no get_image_features: its pictures cannot be planned")
    with torch.no_grad():
        features: Any = owner.get_image_features(**pictures)  # type: ignore[operator]
    features = getattr(features, "pooler_output", features)
    parts = features if isinstance(features, list | tuple) else [features]
    tokens = sum(part.shape[:-1].numel() for part in parts)
    return int(tokens // job.batch_size)


def _without_adapters(model: nn.Module) -> nn.Module:
    return model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
