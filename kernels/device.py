"""The one file that names a device API. Everything else receives a `Device`."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from moorage.kernels.errors import UnknownBackend


@dataclass(frozen=True)
class Device:
    """A device of one type and index.

    The CUDA branches allocate, name and wait; no op has a CUDA backend yet, and dispatch says so.
    """

    type: str
    """`cpu` or `cuda`."""
    index: int = 0

    def __post_init__(self) -> None:
        if self.type not in {"cpu", "cuda"}:
            raise UnknownBackend(f"there is no device type {self.type!r}; types: cpu, cuda")

    @property
    def torch_device(self) -> torch.device:
        """The device as torch names it."""
        return torch.device("cpu") if self.type == "cpu" else torch.device("cuda", self.index)

    @property
    def name(self) -> str:
        """What the hardware calls itself."""
        if self.type == "cuda":
            return str(torch.cuda.get_device_name(self.index))
        return f"cpu ({os.cpu_count()} cores)"

    @property
    def memory_bytes(self) -> int:
        """Bytes of the device's whole memory, in use or not."""
        if self.type == "cuda":
            return int(torch.cuda.get_device_properties(self.index).total_memory)
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    @property
    def pins_memory(self) -> bool:
        """Whether host memory is pinned for copies: where there is no device apart, it is not."""
        return self.type == "cuda"

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised device memory, for a pool; whoever asks fills or tracks it."""
        return torch.empty(shape, dtype=dtype, device=self.torch_device)

    def staging(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised host memory for copies to and from the device."""
        return torch.empty(shape, dtype=dtype, pin_memory=self.pins_memory)

    def synchronise(self) -> None:
        """Wait until everything queued on the device is done; on the CPU nothing is queued.

        Bounded by the queued work alone, and not cancellable.
        """
        if self.type == "cuda":
            torch.cuda.synchronize(self.index)


def default_device() -> Device:
    """The CPU: the only one that every op serves."""
    return Device("cpu")


def set_num_threads(num_threads: int) -> None:
    """Threads of CPU math in this process; 0 leaves torch's choice.

    Deterministic mode holds for a fixed number: set it before the first step.
    """
    if num_threads > 0:
        torch.set_num_threads(num_threads)
