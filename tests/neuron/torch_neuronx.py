"""A stand-in for the vendor's package, which PyTorch loads when it is imported: the device `neuron`
of `device.cpp`. What is asked of `torch.neuron` goes into the folder NEURON_CALLS, a file for each
process.
"""

import importlib.util
import os
from pathlib import Path
from types import SimpleNamespace

import torch


def note(call: str) -> None:
    with (Path(os.environ["NEURON_CALLS"]) / str(os.getpid())).open("a") as file:
        file.write(f"{call}\n")


def get_rng_state(device=None) -> torch.Tensor:
    note("get_rng_state")
    return torch.zeros(16, dtype=torch.uint8, device="cpu")  # numbers are drawn on the host


def register() -> None:
    import torch.distributed as dist

    place = importlib.util.spec_from_file_location("neuron_device", os.environ["NEURON_DEVICE"])
    device = importlib.util.module_from_spec(place)
    place.loader.exec_module(device)
    torch.utils.rename_privateuse1_backend("neuron")
    torch._register_device_module(
        "neuron",
        SimpleNamespace(
            is_available=lambda: True,
            device_count=lambda: int(os.environ["NEURON_CORES"]),
            set_device=lambda index: note(f"set_device {index}"),
            current_device=lambda: 0,
            synchronize=lambda device=None: None,
            get_rng_state=get_rng_state,
            set_rng_state=lambda state, device=None: note("set_rng_state"),
            manual_seed_all=lambda seed: note("manual_seed_all"),
            get_amp_supported_dtype=lambda: [torch.bfloat16, torch.float16],
            _is_in_bad_fork=lambda: False,
        ),
    )

    def group(store, rank, size, timeout):
        note(f"group {rank} of {size}")
        return device.group(dist.ProcessGroupGloo(store, rank, size, timeout))

    dist.Backend.register_backend("neuron", group, devices=["neuron"])
