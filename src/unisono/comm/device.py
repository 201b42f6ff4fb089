"""What is particular to a kind of device, in one place: CPUs, and GPUs under CUDA."""

import torch
import torch.distributed as dist
from torch import Tensor

GPU_BACKEND = "nccl"  # between GPUs; all others are between CPUs


def of_rank(backend: str, local_rank: int) -> torch.device:
    """The device of a rank: its own GPU under NCCL, which becomes this thread's, else the CPU."""
    device = torch.device("cuda", local_rank) if backend == GPU_BACKEND else torch.device("cpu")
    adopt(device)
    return device


def adopt(device: torch.device) -> None:
    """Let this thread stand on its GPU. A new one stands on GPU 0, and would take memory that is not its own."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def numbered(device: torch.device) -> torch.device:
    """The device with its number: `cuda` alone is the one that this thread stands on."""
    is_open = device.type == "cuda" and device.index is None
    return torch.device("cuda", torch.cuda.current_device()) if is_open else device


def is_apart(x: Tensor | torch.device) -> bool:
    """Whether a tensor or device has memory and a stream of its own: copies from it may be pinned and go on beside."""
    return (x if isinstance(x, torch.device) else x.device).type == "cuda"


def between_cpus(pg: dist.ProcessGroup) -> bool:
    """Whether a process group is one of CPUs."""
    return pg.name() != GPU_BACKEND


def drain(device: torch.device) -> None:
    """Return when this thread's stream on the device is empty; a CPU has none."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def synchronize(device: torch.device) -> None:
    """Return when the device has done all that it was given; a CPU has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
