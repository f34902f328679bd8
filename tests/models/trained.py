"""A small model, its plain gradients, and what must be left behind after a fault: nothing."""

from __future__ import annotations

import gc
import threading
from pathlib import Path

import torch
from torch import nn

import lowtide
from lowtide import simdevice
from support import eventually

LAYERS, TOKENS, WIDTH = 5, 128, 32
BOUNDARY = TOKENS * WIDTH * 4
DEVICES = ("cpu", "sim")


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH), nn.Dropout(0.1)

    def forward(self, x):
        return x + self.down(self.dropout(self.up(x).tanh()))


def build(device) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer() for _ in range(LAYERS))).to(device).train()


def forward(model, tokens=TOKENS):
    torch.manual_seed(1)
    x = torch.randn(tokens, WIDTH).to(next(model.parameters()).device)
    return model(x).square().mean()


def train_step(model, tokens=TOKENS):
    model.zero_grad()
    forward(model, tokens).backward()
    return gradients(model)


def gradients(model):
    return [parameter.grad.cpu().clone() for parameter in model.parameters()]


def assert_same(ours, expected):
    assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))


def on_disk(directory, **settings) -> str:
    more = "".join(f", {name}={value}" for name, value in settings.items())
    return f"recompute+offload(disk={directory}, tmpfs{more})"


class Scene:
    """A model under a policy; at the end, the next step must be right and nothing may be left."""

    def __init__(self, device, policy) -> None:
        self.model = build(device)
        self.expected = train_step(self.model)
        self.files, self.threads = open_files(), len(our_threads())
        self.applied = lowtide.apply(self.model, policy)

    @property
    def store(self):
        return self.applied.store

    def assert_recovers(self) -> None:
        """Nothing is held now, and a step is as if nothing had happened."""
        end_of_failed_backward()
        assert eventually(lambda: self.store.bytes_used == 0), "bytes are left in the store"
        for _ in range(2):
            assert_same(train_step(self.model), self.expected)
        assert eventually(lambda: self.store.bytes_used == 0)

    def close(self) -> None:
        """With the policy, everything that it used is gone."""
        self.applied.remove()
        del self.applied
        gc.collect()
        assert eventually(lambda: len(our_threads()) <= self.threads), "threads are left"
        assert eventually(lambda: open_files() <= self.files), "files are left"
        if simdevice.is_enabled():
            torch.accelerator.synchronize()
            assert eventually(lambda: simdevice.stats().pinned_bytes == 0), "pinned memory is left"


def end_of_failed_backward() -> None:
    """Torch keeps what a failed backward on the CPU has not run until the same thread runs another one."""
    torch.ones(1, requires_grad=True).sum().backward()


def our_threads() -> list[threading.Thread]:
    """Without those of torch, which Python comes to know when they first run some."""
    return [thread for thread in threading.enumerate() if thread.name.startswith("lowtide")]


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))
