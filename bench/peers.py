"""How the peers' packages are made to import on a machine without a GPU; none of their code is changed."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import ModuleType

ENVIRONMENT = {
    "DS_ACCELERATOR": "cpu",
    "UNSLOTH_ZOO_DISABLE_GPU_INIT": "1",
    "UNSLOTH_DISABLE_DOUBLE_BUFFER": "1",
    "UNSLOTH_COMPILE_DISABLE": "1",
    "TRITON_INTERPRET": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
"""In force in every section's process, before torch is imported."""


def arctic() -> ModuleType:
    """ArcticTraining's patches, from their own file: the rest of that package wants an older transformers."""
    package = importlib.util.find_spec("arctic_training")
    if package is None:
        raise ModuleNotFoundError("arctic_training is not installed")
    path = Path(package.submodule_search_locations[0], "monkey_patches.py")
    spec = importlib.util.spec_from_file_location("arctic_training.monkey_patches", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def load(name: str) -> ModuleType:
    return importlib.import_module(name)
