"""Raw spans: a tensor is moved as a run of bytes of its storage, and comes back as the same view of them.

So an expanded tensor costs what it holds, a transposed one keeps its layout (and with it the kernels' bits), and every
copy is contiguous, which is what makes it asynchronous. Views that leave gaps, such as the queries, keys and values of
one projection, are moved as their whole storage: once for all of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

SPARSE = 4
"""A view that holds less than a quarter of the bytes that would have to be moved for it stays where it is."""


class Span(NamedTuple):
    """A run of elements of a tensor's storage, and where the tensor lies in it."""

    start: int
    length: int
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        """The run as a flat tensor over the same memory."""
        return tensor.detach().as_strided((self.length,), (1,), self.start)

    def view(self, raw: torch.Tensor) -> torch.Tensor:
        """The tensor, as a view of its run."""
        return raw.as_strided(self.shape, self.stride, raw.storage_offset() + self.offset)


def span_of(tensor: torch.Tensor) -> Span | None:
    """What has to be moved for a tensor, or nothing if that is far more than the tensor itself."""
    shape, stride = tensor.shape, tensor.stride()
    length = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    start, offset = int(tensor.storage_offset()), 0
    if length > tensor.numel():  # gaps: other views are likely to fill them
        start, offset = 0, start
        length = tensor.untyped_storage().nbytes() // tensor.element_size()
    if length > SPARSE * tensor.numel():
        return None
    return Span(start, length, shape, stride, offset)
