"""DeepSpeed on the CPU and on the emulated device, for which DeepSpeed keeps a door open for vendors; its engine."""

from __future__ import annotations

import os

import torch

RATE = 0.5
BUCKET = 100_000  # the default would not fit on the emulated device


def use_cpu() -> None:
    """Let DeepSpeed's ranks meet through gloo: its exchange through shared memory compiles for minutes at first use."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    from deepspeed.ops import __compatible_ops__ as compatible

    compatible["deepspeed_shm_comm"] = False


def use_sim() -> None:
    """Each rank has one device; what is asked of it synchronously is what DeepSpeed asks of a CPU."""
    use_cpu()  # so that importing looks for no other
    os.environ["LOCAL_RANK"] = "0"
    from deepspeed.accelerator import set_accelerator
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    class SimAccelerator(CPU_Accelerator):
        def __init__(self) -> None:
            super().__init__()
            self._name = "sim"
            self._communication_backend_name = "cpu:gloo,sim:sim_gloo"

        def device_name(self, device_index=None):
            return "sim" if device_index is None else f"sim:{device_index}"

        def current_device_name(self):
            return "sim:0"

        def current_device(self):
            return 0

        def on_accelerator(self, tensor):
            return tensor.device.type == "sim"

    set_accelerator(SimAccelerator())


def initialize(model: torch.nn.Module, stage: int):
    """Return DeepSpeed's engine, with plain gradient descent."""
    import deepspeed

    trained = [p for p in model.parameters() if p.requires_grad]
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.SGD(trained, lr=RATE),
        config={
            "train_micro_batch_size_per_gpu": 2,
            "gradient_clipping": 0.0,  # DeepSpeed clips at 1 unless told
            "zero_optimization": {
                "stage": stage,
                "reduce_bucket_size": BUCKET,
                "allgather_bucket_size": BUCKET,
                "stage3_prefetch_bucket_size": BUCKET,
                "stage3_param_persistence_threshold": 0,
            },
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        },
    )
    return engine
