"""Bytes that are back, known only as long as somebody else uses them: several views of them are fetched once."""

from __future__ import annotations

import torch
from torch.multiprocessing.reductions import StorageWeakRef


class Restored:
    """A weak reference to a flat tensor."""

    def __init__(self, raw: torch.Tensor) -> None:
        self._storage = StorageWeakRef(raw.untyped_storage())  # type: ignore[no-untyped-call]
        self._dtype, self._device = raw.dtype, raw.device
        self._offset, self._size = raw.storage_offset(), raw.numel()

    def get(self) -> torch.Tensor | None:
        """The tensor, if it is still in use."""
        storage: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)
        if storage is None:
            return None
        empty = torch.empty(0, dtype=self._dtype, device=self._device)
        return empty.set_(storage, self._offset, (self._size,), (1,))
