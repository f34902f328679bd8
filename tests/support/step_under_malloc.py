"""Run with `count_malloc.c` preloaded: prints how much the second step of a real run adds at its peak."""

from __future__ import annotations

import ctypes
import gc
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch

import lowtide
from models.planned import batch_maker, make_model
from support.real_steps import train

torch.set_num_threads(1)
family, policy = sys.argv[1:]
library = ctypes.CDLL(None)
library.counted_live.restype = library.counted_peak.restype = ctypes.c_long
model = make_model(family, torch.float32, lora=False, device="cpu").train()
batch = batch_maker(family, torch.float32)(model, "cpu")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)
with lowtide.apply(model, policy):
    train(model, batch, optimizer)
    gc.collect()
    before = library.counted_live()
    library.forget_peak()
    train(model, batch, optimizer)
sys.stdout.write(f"{library.counted_peak() - before}\n")
