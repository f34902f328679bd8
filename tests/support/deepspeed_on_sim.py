"""DeepSpeed on the emulated device: an accelerator of its own, through the door that DeepSpeed keeps for vendors."""

from __future__ import annotations

import os


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
