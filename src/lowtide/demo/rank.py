"""Runs one rank of the demo's DDP act: `torchrun --nproc-per-node 2 -m lowtide.demo.rank`. Rank 0 prints JSON."""

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
    found = {"audit": audit_ours(batch), "reentrant": run_reentrant(batch)}
    if dist.get_rank() == 0:
        sys.stdout.write(json.dumps(found) + "\n")
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # the refused backward left collectives behind, and gloo's threads abort an interpreter that ends


def audit_ours(batch: dict[str, Tensor]) -> dict[str, Any]:
    """Audit Lowtide on every rank, against the average of the plain gradients over the ranks."""
    model = build().to("sim")
    lowtide.apply(model, POLICY)
    return lowtide.audit(wrap(model), batch, checks=CHECKS).to_dict()


def run_reentrant(batch: dict[str, Tensor]) -> str:
    """Run the same set-up with torch's reentrant checkpoint; return the first line of the error, if there is one."""
    model = build().to("sim")
    model.enable_input_require_grads()  # type: ignore[operator]
    model.gradient_checkpointing_enable({"use_reentrant": True})  # type: ignore[operator]
    parallel = wrap(model)
    try:
        parallel(**batch).loss.backward()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return ""


def wrap(model: nn.Module) -> DistributedDataParallel:
    """Wrap a model in DDP with the option that adapters, and towers that a batch may leave out, need."""
    return DistributedDataParallel(model, find_unused_parameters=True)


if __name__ == "__main__":
    main()
