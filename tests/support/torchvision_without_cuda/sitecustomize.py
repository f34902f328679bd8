"""Lets torchvision import where its wheel is built for CUDA and torch is not: on the path of every process of a test.

Importing torchvision asks for two operators that such a wheel cannot load there; transformers, diffusers and timm then
find a torchvision that is installed and fails.
"""

from __future__ import annotations

import importlib.util

import torch

LIBRARY = torch.library.Library("torchvision", "FRAGMENT")

if importlib.util.find_spec("torchvision") is not None and torch.version.cuda is None:
    for name in ("nms", "qnms"):
        LIBRARY.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
