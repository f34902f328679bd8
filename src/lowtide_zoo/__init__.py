"""Tiny random models and fitting batches for every architecture of the installed transformers, without the hub.

`find` starts from a configuration class alone: it shrinks the defaults (`shrink`), builds the most inclusive model
class (`classes`), proposes batches from the arguments of its forward (`batches`), and keeps the first that trains all
of the model (`trial`). What it hands out, a `TinyModel`, builds the same model and batch for the same seed, anywhere.
"""

from __future__ import annotations

from lowtide.errors import CannotBuildError
from lowtide_zoo.classes import model_types
from lowtide_zoo.find import find
from lowtide_zoo.tiny_model import TinyModel

__all__ = ["CannotBuildError", "TinyModel", "find", "model_types"]
