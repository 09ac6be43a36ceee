"""Moving blocks, and the device."""

from __future__ import annotations

import pytest
import torch

from moorage.kernels import ops
from moorage.kernels.device import Device, default_device, set_num_threads
from moorage.kernels.errors import UnknownBackend

NAN = float("nan")


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.nan_to_num(-1.0), b.nan_to_num(-1.0))


def test_block_moves_touch_what_they_name_and_nothing_else(backend: str) -> None:
    pool = torch.arange(6 * 2 * 2 * 1 * 2 * 2, dtype=torch.float32).reshape(6, 2, 2, 1, 2, 2)
    before = pool.clone()
    staging = torch.full((2, 2, 2, 1, 2, 2), NAN)
    ops.gather_blocks(pool, torch.tensor([4, 1]), staging)
    assert torch.equal(staging, before[[4, 1]])
    ops.fill_blocks(pool, torch.tensor([4, 1]), NAN)
    assert bool(torch.isnan(pool[[1, 4]]).all())
    assert torch.equal(pool[[0, 2, 3, 5]], before[[0, 2, 3, 5]])
    ops.scatter_blocks(pool, torch.tensor([1, 4]), staging)
    assert torch.equal(pool[1], before[4]) and torch.equal(pool[4], before[1])
    ops.copy_blocks(pool, torch.tensor([0]), torch.tensor([5]))
    assert torch.equal(pool[5], before[0])
    assert torch.equal(pool[[0, 2, 3]], before[[0, 2, 3]])


def test_store_kv_writes_the_slots_of_one_layer(backend: str) -> None:
    pool = torch.full((4, 3, 2, 2, 2, 3), NAN)
    key, value = torch.full((2, 2, 3), 7.0), torch.full((2, 2, 3), 9.0)
    ops.store_kv(key, value, pool[:, 1], torch.tensor([2 * 2 + 1, 3 * 2]))
    expected = torch.full_like(pool, NAN)
    expected[2, 1, 0, :, 1], expected[2, 1, 1, :, 1] = 7.0, 9.0
    expected[3, 1, 0, :, 0], expected[3, 1, 1, :, 0] = 7.0, 9.0
    assert same(pool, expected)


def test_gathered_bytes_are_the_pools_own(backend: str) -> None:
    """NaN payloads and signed zeros too: a parked frame is compared by its bytes."""
    pool = torch.tensor([[-0.0, 1.0], [NAN, -NAN], [0.0, 2.0]]).bfloat16()
    bits = pool.view(torch.int16)
    bits[1, 1] = 0x7FA5
    staging = torch.empty(2, 2, dtype=torch.bfloat16)
    ops.gather_blocks(pool, torch.tensor([1, 0]), staging)
    assert torch.equal(staging.view(torch.int16), bits[[1, 0]])


def test_the_cpu_device() -> None:
    device = default_device()
    assert device == Device("cpu")
    assert device.torch_device == torch.device("cpu")
    assert device.name.startswith("cpu (")
    assert device.memory_bytes > 1 << 28
    pool = device.empty((3, 2), torch.bfloat16)
    assert (pool.shape, pool.dtype, pool.device.type) == ((3, 2), torch.bfloat16, "cpu")
    assert not device.pins_memory and not device.staging((4,), torch.float32).is_pinned()
    device.synchronise()


def test_a_device_that_is_none() -> None:
    with pytest.raises(UnknownBackend, match="there is no device type 'tpu'; types: cpu, cuda"):
        Device("tpu")
    assert Device("cuda", 1).torch_device == torch.device("cuda", 1)


def test_zero_threads_leave_the_choice_to_torch() -> None:
    before = torch.get_num_threads()
    set_num_threads(0)
    assert torch.get_num_threads() == before
    set_num_threads(2)
    assert torch.get_num_threads() == 2
    set_num_threads(before)
