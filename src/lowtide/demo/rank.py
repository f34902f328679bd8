"""One rank of the demo's DDP run: `torchrun --nproc-per-node 2 -m lowtide.demo.rank`. Rank 0 prints what was found."""

from __future__ import annotations

import json
import os
import sys
import warnings
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import lowtide
from lowtide import simdevice
from lowtide.demo.training import POLICY, build, make_batch

if TYPE_CHECKING:
    from torch import Tensor, nn

CHECKS = ("recomputed", "gradients present", "gradient values", "DDP readiness", "ranks agree")


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    simdevice.enable()
    dist.init_process_group("cpu:gloo,sim:sim_gloo")
    batch = {name: tensor.to("sim") for name, tensor in make_batch(dist.get_rank()).items()}
    found = {"audit": audited(batch), "reentrant": reentrant(batch)}
    if dist.get_rank() == 0:
        sys.stdout.write(json.dumps(found) + "\n")
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # the refused backward left collectives behind: gloo's threads with them abort an interpreter that ends


def audited(batch: dict[str, Tensor]) -> dict[str, Any]:
    """Ours, judged on every rank against the average of plain gradients over ranks."""
    model = build().to("sim")
    lowtide.apply(model, POLICY)
    return lowtide.audit(wrapped(model), batch, checks=CHECKS).to_dict()


def reentrant(batch: dict[str, Tensor]) -> str:
    """What the same set-up says with torch's reentrant checkpoint: the first line of the error, if there is one."""
    model = build().to("sim")
    model.enable_input_require_grads()  # type: ignore[operator]
    model.gradient_checkpointing_enable({"use_reentrant": True})  # type: ignore[operator]
    parallel = wrapped(model)
    try:
        parallel(**batch).loss.backward()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return ""


def wrapped(model: nn.Module) -> DistributedDataParallel:
    """With the option that people need for adapters and towers that a batch may leave out."""
    return DistributedDataParallel(model, find_unused_parameters=True)


if __name__ == "__main__":
    main()
