"""Collectives for `sim` tensors: staged through the host and carried by gloo.

The backend is called `sim_gloo`. `init_process_group("cpu:gloo,sim:sim_gloo")` names it; with no backend at all, torch
picks it for `sim` tensors by itself. A collective here is synchronous: when the call returns, it is done.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

BACKEND = "sim_gloo"


def register() -> None:
    """Tell torch.distributed about the backend, unless this torch is built without it."""
    if dist.is_available() and BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, _create, devices=["sim"])


def _create(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    return _group_class()(store, rank, size, timeout)


def _staged(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.cpu() for tensor in tensors]


def _finished(result: Any) -> Any:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(result)
    return torch._C._distributed_c10d._create_work_from_future(future)


def _group_class() -> type:
    """The class is made on demand: a torch without distributed has no `ProcessGroup` to inherit from."""

    class SimGloo(dist.ProcessGroup):  # type: ignore[misc]
        def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
            super().__init__(rank, size)
            self._gloo = dist.ProcessGroupGloo(dist.PrefixStore(BACKEND, store), rank, size, timeout)

        def getBackendName(self) -> str:  # noqa: N802  (torch's name)
            return BACKEND

        def _in_place(self, tensors: list[Tensor], collective: Callable[[list[Tensor]], Any]) -> Any:
            host = _staged(tensors)
            collective(host).wait()
            for tensor, result in zip(tensors, host, strict=True):
                tensor.copy_(result)
            return _finished(tensors)

        def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
            options = opts if opts is not None else dist.AllreduceOptions()
            return self._in_place(tensors, lambda host: self._gloo.allreduce(host, options))

        def broadcast(self, tensors: list[Tensor], opts: Any) -> Any:
            return self._in_place(tensors, lambda host: self._gloo.broadcast(host, opts))

        def reduce(self, tensors: list[Tensor], opts: Any) -> Any:
            return self._in_place(tensors, lambda host: self._gloo.reduce(host, opts))

        def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
            host = [_staged(row) for row in outputs]
            self._gloo.allgather(host, _staged(inputs)).wait()
            for row, gathered in zip(outputs, host, strict=True):
                for tensor, result in zip(row, gathered, strict=True):
                    tensor.copy_(result)
            return _finished(outputs)

        def _allgather_base(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
            return self.allgather([list(output.chunk(self.size()))], [input])

        def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> Any:
            host = [_staged(row) for row in inputs]
            for row in host:
                self._gloo.allreduce(row, _allreduce_options(opts)).wait()
            for tensor, row in zip(outputs, host, strict=True):
                tensor.copy_(row[self.rank()])
            return _finished(outputs)

        def _reduce_scatter_base(self, output: Tensor, input: Tensor, opts: Any) -> Any:
            return self.reduce_scatter([output], [list(input.chunk(self.size()))], opts)

        def barrier(self, opts: Any = None) -> Any:
            return self._gloo.barrier()

    return SimGloo


def _allreduce_options(reduce_scatter: Any) -> Any:
    options = dist.AllreduceOptions()
    options.reduceOp = reduce_scatter.reduceOp
    return options
