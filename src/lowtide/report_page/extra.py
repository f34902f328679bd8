"""The packages of the `html` extra, imported when a page is made."""

from __future__ import annotations

import importlib
from typing import Any

from lowtide.errors import MissingDependencyError


def load(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise MissingDependencyError(
            f"an HTML page needs {package}, which cannot be imported here ({error}): pip install lowtide[html]"
        ) from error
