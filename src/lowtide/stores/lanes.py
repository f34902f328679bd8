"""The side streams that carry copies: one pair per device and store, made at first use."""

from __future__ import annotations

import threading
from typing import NamedTuple

import torch


class Lanes(NamedTuple):
    """The side streams of one device."""

    to_host: torch.Stream
    to_device: torch.Stream


class LanesOfDevices:
    """The lanes of each device that has come by."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lanes: dict[torch.device, Lanes] = {}

    def of(self, device: torch.device) -> Lanes:
        with self._lock:
            if device not in self._lanes:
                self._lanes[device] = Lanes(torch.Stream(device=device), torch.Stream(device=device))
            return self._lanes[device]


_DEFAULT_STREAM = 0


def keep_for(raw: torch.Tensor, owner: torch.Stream, *others: torch.Stream) -> None:
    """Before `raw` is let go: unless its owner is a default stream, the memory may belong to another stream."""
    if owner.stream_id != _DEFAULT_STREAM:
        for stream in (owner, *others):
            raw.record_stream(stream)
