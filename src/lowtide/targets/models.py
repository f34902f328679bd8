"""Builds the model that a target stands for: on the meta device for a plan, for real for an audit.

A plan needs shapes alone: `build` makes the model without weights, with LoRA adapters if the job has them. An audit
runs training steps: `load` makes the model with its weights if they are on this machine, else with random ones. Both
start from the same configuration and call factories in the same way. A live module and a factory may bring a batch;
for other models `batches`, or the zoo, makes one from the configuration.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from packaging.version import Version
from torch import nn

from lowtide._torch import pytree
from lowtide.compat import installed_version
from lowtide.errors import CannotAuditError, InvalidValueError, LowtideError, MissingDependencyError, PlanError
from lowtide.randomness import seeded
from lowtide.targets import INSTALL_HF
from lowtide.targets.batches import CLASSIFIERS
from lowtide.targets.job import DTYPES, LORA_TARGETS
from lowtide.targets.live_module import unpickle
from lowtide.targets.target import model_types

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lowtide.targets.job import Job
    from lowtide.targets.target import Target

logger = logging.getLogger(__name__)

OLDEST_TRANSFORMERS = Version("5")
"""The step of an older model builds masks and experts in ways that the simulator was never compared with."""

PLANNED_HEADS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "ForMaskedLM", *CLASSIFIERS)
"""The endings of the classes for which a plan makes a batch."""

_WITH_BATCH, _WITH_OPTIONS = 2, 3
"""How many things a factory returns: model and batch; model, batch and options."""


def build(target: Target, job: Job) -> nn.Module:
    """Build the model of a target on the meta device, with adapters if the job has them."""
    return build_with_batch(target, job)[0]


def build_with_batch(target: Target, job: Job) -> tuple[nn.Module, Any]:
    """Build the model of a target on the meta device, and return it with its batch; None if it brought none."""
    batch = None
    if target.kind == "module":
        _refuse_changes(target, job)
        model, batch = unpickle(target.content, target.name)
    elif target.kind == "factory":
        with _on_meta(job):
            model, batch, _ = call_factory(target.name)
        _require_values(target, batch)
    else:
        model = _build_without_weights(target, job)
    _require_transformers_5(model)
    if batch is not None and (job.tokens, job.batch_size, job.images) != (None, 1, None):
        raise InvalidValueError(
            f"{target.name} brings its own batch, and a batch has its own size: leave tokens, batch_size and images out"
        )
    model.to("meta")
    if job.kbit:
        _prepare_for_kbit_training(model)
    return (model if job.lora is None else _with_adapters(model, job)), batch


def load(target: Target, *, seed: int = 0) -> tuple[nn.Module, Any, dict[str, Any]]:
    """Build the model of a target for real, and return it with the batch and the options that its factory gave.

    Weights come from the target's folder or from the local cache of the Hub; if there are none they are random, drawn
    from `seed`. Nothing is downloaded. The batch of a model that no factory made is None.
    """
    if target.kind == "factory":
        return call_factory(target.name)
    config = _configuration(target)
    folder = _weights_folder(target)
    try:
        cls = _class_for_audit(config)
        with seeded(seed):  # for all weights, or for those that are not in the folder
            model = _random_model(cls, config) if folder is None else cls.from_pretrained(folder, config=config)  # type: ignore[attr-defined]
    except (OSError, ValueError, TypeError, AttributeError, ImportError, ArithmeticError, RuntimeError) as error:
        raise CannotAuditError(f"{target.name} could not be loaded: {type(error).__name__}: {error}") from error
    return model, None, {}


def count_parameters(target: Target) -> int | None:
    """Count the parameters that `load` would make; None for a factory, and where it cannot be told beforehand."""
    if target.kind == "factory":
        return None
    config = _configuration(target)
    try:
        with torch.device("meta"):
            return sum(parameter.numel() for parameter in _random_model(_class_for_audit(config), config).parameters())
    except (RuntimeError, ValueError, TypeError, AttributeError, ArithmeticError):
        return None  # the few models that look at values while they are built; `load` says what is wrong with others


def call_factory(name: str) -> tuple[nn.Module, Any, dict[str, Any]]:
    """Call `MODULE:FACTORY?name=value` and return its model, its batch (None without one) and its options."""
    path, _, query = name.partition("?")
    module, _, function = path.partition(":")
    arguments = read_arguments(query, name)
    with current_folder_importable():
        try:
            factory = getattr(importlib.import_module(module), function)
        except (Exception, SystemExit) as error:  # whatever the user's module raises when it is imported
            logger.debug("%s cannot be imported", name, exc_info=error)
            raise PlanError(f"{name} cannot be imported: {error} (lowtide -v shows where)") from error
        try:
            made = factory(**arguments)
        except LowtideError:
            raise
        except (Exception, SystemExit) as error:
            logger.debug("%s could not be run", name, exc_info=error)
            raise PlanError(
                f"{name} could not be run: {type(error).__name__}: {error} (lowtide -v shows where)"
            ) from error
    parts = made if isinstance(made, tuple) else (made,)
    if not 1 <= len(parts) <= _WITH_OPTIONS or not isinstance(parts[0], nn.Module):
        raise PlanError(
            f"{name} must return a torch.nn.Module, (model, batch), or (model, batch, options) with keywords of "
            f"lowtide.audit as options; it returned {type(made).__name__}"
        )
    batch = parts[1] if len(parts) >= _WITH_BATCH else None
    return parts[0], batch, parts[2] if len(parts) == _WITH_OPTIONS else {}


_WORDS = {"true": True, "false": False, "none": None}


def read_arguments(query: str, name: str) -> dict[str, Any]:
    """Read a factory's arguments from `layers=4&seq=8192`: numbers, true, false and none; all else is text."""
    arguments: dict[str, Any] = {}
    for part in filter(None, query.split("&")):
        key, equals, value = part.partition("=")
        if not equals or not key.isidentifier() or key in arguments:
            reason = "is given twice" if key in arguments else "is not an argument"
            raise InvalidValueError(f"{name}: {part!r} {reason}: write MODULE:FACTORY?layers=4&seq=8192")
        arguments[key] = _argument_value(value)
    return arguments


def _argument_value(text: str) -> Any:
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    for read in (int, float):
        with contextlib.suppress(ValueError):
            return read(text)
    return text


@contextlib.contextmanager
def current_folder_importable() -> Iterator[None]:
    """Let modules of the current folder be imported inside, as `python -m` does; `sys.path` is put back afterwards."""
    folder = str(Path.cwd())
    if "" in sys.path or folder in sys.path:
        yield
        return
    sys.path.insert(0, folder)
    try:
        yield
    finally:  # entries that the user's code added stay
        with contextlib.suppress(ValueError):
            sys.path.remove(folder)


def _refuse_changes(target: Target, job: Job) -> None:
    if job.lora is not None:
        raise InvalidValueError(
            f"lora={job.lora}: {target.name} is planned as it is. Give it adapters first (peft.get_peft_model), or "
            "plan it by name"
        )
    if job.dtype is not None:
        raise InvalidValueError(
            f"dtype={job.dtype!r}: {target.name} is planned as it is. Convert it first (model.to), or plan it by name"
        )


def _require_values(target: Target, batch: Any) -> None:
    """Refuse integers on the meta device: token numbers and lengths decide what a step does."""
    if any(
        isinstance(leaf, torch.Tensor) and leaf.is_meta and not leaf.dtype.is_floating_point
        for leaf in pytree.tree_leaves(batch)
    ):
        raise PlanError(
            f"{target.name} is called on the meta device, where tensors have no values, but the integers in its batch "
            'matter: make them with device="cpu"'
        )


def _require_transformers_5(model: nn.Module) -> None:
    version = installed_version("transformers")
    is_of_transformers = any(cls.__module__.partition(".")[0] == "transformers" for cls in type(model).__mro__)
    if is_of_transformers and version is not None and version < OLDEST_TRANSFORMERS:
        raise PlanError(
            f"planning {type(model).__name__} needs transformers {OLDEST_TRANSFORMERS} or newer, and {version} is "
            "installed: the figures would be wrong. apply and audit work with it"
        )


def _build_without_weights(target: Target, job: Job) -> nn.Module:
    config = _configuration(target)
    cls = _named_class(config, target.name) or _class_with_loss(config)
    if cls is None:
        raise PlanError(
            f"{config.model_type} has no model that computes a language-modelling loss: plan it as 'MODULE:FACTORY', "
            "with a module that returns its loss"
        )
    kernel = "sdpa" if getattr(cls, "_supports_sdpa", False) else "eager"
    try:
        with _on_meta(job):
            return cls._from_config(config, attn_implementation=kernel, dtype=job.built_in)  # type: ignore[no-any-return, attr-defined]
    except (NotImplementedError, RuntimeError, ValueError, TypeError, AttributeError) as error:
        raise PlanError(f"{cls.__name__} cannot be built without weights: {type(error).__name__}: {error}") from error


@contextlib.contextmanager
def _on_meta(job: Job) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(job.built_in)
    try:
        with torch.device("meta"):
            yield
    finally:
        torch.set_default_dtype(before)


def _configuration(target: Target) -> Any:
    """Return the transformers configuration of a target, with key-value caches off: training has no use for them."""
    try:
        transformers = importlib.import_module("transformers")
    except ImportError as error:
        raise MissingDependencyError(f"building {target.name} needs transformers: {INSTALL_HF}") from error
    fields = target.fields
    model_type = fields.pop("model_type")
    if model_type not in model_types():
        raise PlanError(
            f"{target.name}: transformers {transformers.__version__} has no model type {model_type!r}; a newer one may"
        )
    try:
        config = transformers.AutoConfig.for_model(model_type, **fields)
    except Exception as error:  # each class validates its fields in its own way
        reason = " ".join(str(error).split())
        raise PlanError(f"{target.name}: transformers refuses the configuration: {reason}") from error
    _disable_caches(config)
    return config


def _disable_caches(config: Any) -> None:
    if hasattr(config, "use_cache"):
        config.use_cache = False
    for part in list(vars(config).values()):
        if hasattr(part, "to_dict") and hasattr(part, "model_type"):
            _disable_caches(part)


def _class_with_loss(config: Any) -> type[nn.Module] | None:
    auto = importlib.import_module("transformers.models.auto.modeling_auto")
    for name in (
        "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING",
        "MODEL_FOR_CAUSAL_LM_MAPPING",
        "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
        "MODEL_FOR_MASKED_LM_MAPPING",
    ):
        mapping = getattr(auto, name, {})
        if type(config) in mapping:
            found = mapping[type(config)]
            return found[0] if isinstance(found, tuple) else found  # type: ignore[no-any-return]
    return None


def _named_class(config: Any, name: str) -> type[nn.Module] | None:
    """Return the class that the configuration names, if it computes a loss from a batch that a plan can make."""
    transformers = importlib.import_module("transformers")
    named = (getattr(config, "architectures", None) or [None])[0]
    cls = None if named is None else getattr(transformers, named, None)
    if cls is None or "labels" not in inspect.signature(cls.forward).parameters:
        return None
    if not named.endswith(PLANNED_HEADS):
        raise PlanError(
            f"{name}: its configuration names {named}, and a plan makes no batch for that. Plan it as "
            "'MODULE:FACTORY', a function that returns (model, batch), or without `architectures`"
        )
    return cls  # type: ignore[no-any-return]


def _class_for_audit(config: Any) -> type[nn.Module]:
    """Return the class that the configuration names, else the one with a language-modelling loss, else the bare one."""
    transformers = importlib.import_module("transformers")
    if config.architectures:
        return getattr(transformers, config.architectures[0])  # type: ignore[no-any-return]
    return _class_with_loss(config) or transformers.AutoModel


def _random_model(cls: Any, config: Any) -> nn.Module:
    model: nn.Module = cls.from_config(config) if hasattr(cls, "from_config") else cls(config)
    return model


def _weights_folder(target: Target) -> Path | None:
    """Return the folder that holds the target's weights, if there is one on this machine."""
    if target.weights is None:
        return None
    folder = Path(target.weights)
    if not folder.is_dir():
        hub = importlib.import_module("huggingface_hub")
        cached = hub.try_to_load_from_cache(target.weights, "config.json")
        if not isinstance(cached, str):
            return None
        folder = Path(cached).parent
    has_weights = any(any(folder.glob(pattern)) for pattern in ("model*.safetensors", "pytorch_model*.bin"))
    return folder if has_weights else None


class PackedLinear(nn.Linear):
    """Computes in the type of its weight, whatever its input has, as a layer of bitsandbytes in its compute type."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002  (as in torch)
        bias = None if self.bias is None else self.bias.to(self.weight.dtype)
        return nn.functional.linear(input.to(self.weight.dtype), self.weight, bias).to(input.dtype)


def is_packed(name: str, module: nn.Module) -> bool:
    """Return whether bitsandbytes quantizes a module's weight: a linear layer's, but not the head's, nor adapters'."""
    is_linear = type(module).__name__ in ("Linear", "PackedLinear")
    return is_linear and "lora_" not in name and not name.endswith("lm_head")


def _prepare_for_kbit_training(model: nn.Module) -> None:
    """Do what PEFT's function of that name does to a 4-bit base: all 16-bit weights but packed ones become float32."""
    packed = [module for name, module in model.named_modules() if is_packed(name, module)]
    kept = {id(module.weight) for module in packed}
    for module in packed:
        module.__class__ = PackedLinear
    for parameter in model.parameters():
        if parameter.dtype in (torch.float16, torch.bfloat16) and id(parameter) not in kept:
            parameter.data = parameter.data.float()


def _with_adapters(model: nn.Module, job: Job) -> nn.Module:
    try:
        peft = importlib.import_module("peft")
    except ImportError as error:
        raise MissingDependencyError(f"planning LoRA needs peft: {INSTALL_HF}") from error
    config = peft.LoraConfig(
        r=job.lora,
        lora_alpha=job.lora,
        lora_dropout=job.lora_dropout,
        target_modules=_lora_targets(model, job.lora_targets),
    )
    with _on_meta(job):
        adapted: nn.Module = peft.get_peft_model(model, config, autocast_adapter_dtype=False)
    for parameter in adapted.parameters():
        if parameter.requires_grad:  # PEFT itself only offers the base's type and float32
            parameter.data = parameter.data.to(DTYPES[job.lora_dtype])
    return adapted.to("meta")


def _lora_targets(model: nn.Module, wanted: tuple[str, ...]) -> list[str] | str:
    """Choose PEFT's `target_modules`: the names that were asked for; by default the usual ones, else all layers.

    As in PEFT, a name stands for every layer whose own name ends with it. A name that fits no layer is refused.
    """
    layers = [name for name, module in model.named_modules() if _is_linear(module)]
    there = [target for target in wanted if any(f".{name}".endswith(f".{target}") for name in layers)]
    if wanted == LORA_TARGETS:
        return there or "all-linear"
    if missing := [target for target in wanted if target not in there]:
        known = ", ".join(sorted({name.rpartition(".")[2] for name in layers}))
        raise InvalidValueError(f"no linear layer is called {', '.join(missing)}: there are {known}")
    return there


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"  # GPT-2's linear layers
