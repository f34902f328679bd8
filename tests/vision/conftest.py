"""What is in force before diffusers and timm are imported, here and in processes that a test starts."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

WHEEL = Path(__file__).parents[1] / "support" / "torchvision_without_cuda"

if importlib.util.find_spec("torchvision") is not None and str(WHEEL) not in sys.path:
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(WHEEL), os.environ.get("PYTHONPATH")]))
    spec = importlib.util.spec_from_file_location("torchvision_without_cuda", WHEEL / "sitecustomize.py")
    sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[spec.name])
