"""The one file that names a device API. Everything else receives a `Device`."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Device:
    """A device of one type and index."""

    type: str
    index: int = 0

    @property
    def torch_device(self) -> torch.device:
        """The device as torch names it."""
        return torch.device(self.type) if self.type == "cpu" else torch.device(self.type, self.index)

    @property
    def name(self) -> str:
        """What the hardware calls itself."""
        if self.type == "cuda":
            return str(torch.cuda.get_device_name(self.index))
        return f"cpu ({os.cpu_count()} cores)"

    @property
    def memory_bytes(self) -> int:
        """Bytes of the device's whole memory."""
        if self.type == "cuda":
            return int(torch.cuda.get_device_properties(self.index).total_memory)
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised device memory."""
        return torch.empty(shape, dtype=dtype, device=self.torch_device)

    def staging(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised host memory for copies to and from the device; pinned where that makes them asynchronous."""
        return torch.empty(shape, dtype=dtype, pin_memory=self.type == "cuda")

    def synchronise(self) -> None:
        """Wait until everything queued on the device is done; nothing to wait for on the CPU."""
        if self.type == "cuda":
            torch.cuda.synchronize(self.index)


def default_device() -> Device:
    """The CPU: kernels for other devices are not there yet, and a device that only some ops know is of no use."""
    return Device("cpu")


def set_num_threads(num_threads: int) -> None:
    """Threads of CPU math in this process; 0 leaves torch's choice."""
    if num_threads > 0:
        torch.set_num_threads(num_threads)
