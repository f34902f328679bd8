"""Builds a tiny random model and a batch that trains it, for every architecture of the installed transformers.

Nothing is downloaded. A tiny model comes about in five steps, from nothing but a model type such as `llama`:

1. `classes` looks up the configuration class and the model classes, the most inclusive first;
2. `shrink` makes the default configuration small: integers by their names (`size_profile`), layers and stages by what
   the lists describe (`layers`), and a few fields of single architectures by hand (`overrides`);
3. `tiny_model` builds the model;
4. `find` proposes batches from the arguments of its forward (`model_inputs`): text, `images`, `audio`, text with
   `placeholders` for both, then `extra_inputs` and labels; architectures whose batches cannot be inferred from the
   arguments have theirs in `special_cases`;
5. a smoke step runs each proposal forward and backward, and the first that trains all of the model is kept.

The result is a `TinyModel`. It builds the same model and the same batch for the same seed, anywhere.

The rest audits them: `survey` runs one process per architecture, `records` is what it writes down, and `page` shows it.
"""

from __future__ import annotations

from lowtide.errors import CannotBuildError
from lowtide_zoo.classes import model_types
from lowtide_zoo.find import find, fitting_batch
from lowtide_zoo.tiny_model import TinyModel

__all__ = ["CannotBuildError", "TinyModel", "find", "fitting_batch", "model_types"]
