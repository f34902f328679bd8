"""Runs one rank of the stage `ranks`: `torchrun --nproc-per-node 2 -m lowtide.selftest.rank DEVICE`.

Rank 0 prints JSON. Under DDP the audit judges; under FSDP2, gradients are compared with those of the plain model under
FSDP2, from the same weights and the same batches.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import lowtide
from lowtide import simdevice
from lowtide.regions import find_regions
from lowtide.selftest.models import TOKENS, build
from lowtide.selftest.noise import PlainRuns

if TYPE_CHECKING:
    from torch import nn

    from lowtide.auditing.comparison import Gradients

CHECKS = ("recomputed", "gradients present", "gradient values", "DDP readiness", "ranks agree")
BACKENDS = {"cuda": "nccl", "xpu": "xccl", "npu": "hccl", "cpu": "gloo", "sim": "cpu:gloo,sim:sim_gloo"}


def main(kind: str) -> None:
    warnings.simplefilter("ignore")
    device = _prepare(kind)
    dist.init_process_group(BACKENDS[kind])
    offload = "" if kind == "cpu" else "+offload"
    policies = [f"recompute{offload}", f"recompute{offload}+tile(tokens=32, loss_tokens=32)"]
    rows = [_tried(engine, policy, device) for engine in ("DDP", "FSDP2") for policy in policies]
    if dist.get_rank() == 0:
        sys.stdout.write("\n" + json.dumps(rows) + "\n")
        sys.stdout.flush()
    dist.barrier()
    os._exit(0)  # gloo's threads abort an interpreter that ends after a collective that failed


def _prepare(kind: str) -> torch.device:
    if kind == "cpu":
        return torch.device("cpu")
    if kind == "sim":
        torch.set_num_threads(1)
        simdevice.enable()
        return torch.device("sim")
    rank = int(os.environ["LOCAL_RANK"])
    torch.accelerator.set_device_index(rank)
    return torch.device(kind, rank)


def _tried(engine: str, policy: str, device: torch.device) -> dict[str, str]:
    try:
        verdict, summary = (_ddp if engine == "DDP" else _fsdp2)(policy, device)
    except NotImplementedError as error:  # the emulated device's collectives
        verdict, summary = "inconclusive", f"this device cannot run it: {error}"
    except Exception as error:  # noqa: BLE001  (whatever the engine raises is the finding)
        verdict, summary = "fail", f"raises {type(error).__name__}: {error}"
    return {"name": f"{engine}, {policy}, {dist.get_world_size()} ranks", "verdict": verdict, "summary": summary}


def _ddp(policy: str, device: torch.device) -> tuple[str, str]:
    model, batch = _model_and_batch(device)
    lowtide.apply(model, policy)
    report = lowtide.audit(DistributedDataParallel(model), batch, checks=CHECKS)
    summaries = [check.summary for check in (*report.failures, *report.unproven)]
    return ("pass" if report.ok else "fail"), "; ".join(summaries) or report["gradient values"].summary


def _fsdp2(policy: str, device: torch.device) -> tuple[str, str]:
    plain = PlainRuns(lambda: _sharded_gradients(None, device))  # each rank has all gradients, and decides the same
    judged = plain.judge(_sharded_gradients(policy, device), rounds="tile" in policy)
    return judged.verdict, judged.summary


def _sharded_gradients(policy: str | None, device: torch.device) -> Gradients:
    model, batch = _model_and_batch(device)
    for region in find_regions(model):
        fully_shard(region.module)
    fully_shard(model)
    if policy is not None:
        lowtide.apply(model, policy)
    loss: Any = model(**batch).loss
    loss.backward()
    gradients: dict[str, Any] = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {name: None if grad is None else grad.full_tensor() for name, grad in gradients.items()}


def _model_and_batch(device: torch.device) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Return the same model on every rank, and a batch of the rank's own length."""
    model, batch = build("llama")
    length = TOKENS - 16 * dist.get_rank()
    return model.to(device), {name: tensor[:, :length].contiguous().to(device) for name, tensor in batch.items()}


if __name__ == "__main__":
    main(sys.argv[1])
