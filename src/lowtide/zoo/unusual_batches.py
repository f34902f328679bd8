"""Batches of single architectures that cannot be told from the arguments of a forward, each with its reason.

Keyed by model type. A recipe may name arguments that some of the type's classes do not take; those are left out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lowtide.zoo import unusual_pictures, unusual_sound, unusual_texts

if TYPE_CHECKING:
    from lowtide.zoo.parts import Recipe
    from lowtide.zoo.scene import Scene

BATCHES = unusual_pictures.BATCHES | unusual_sound.BATCHES | unusual_texts.BATCHES


def unusual(scene: Scene) -> list[Recipe]:
    """The batch made for this model's type, if there is one."""
    make = BATCHES.get(scene.config.model_type)
    return [make(scene)] if make is not None else []
