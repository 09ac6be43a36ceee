"""Every test here runs with value checks on, fresh dispatch counters and a fixed seed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from moorage.kernels import contracts, dispatch


@pytest.fixture(autouse=True)
def strict_kernels() -> Iterator[None]:
    torch.manual_seed(0)
    dispatch.counts.clear()
    with contracts.checked_values():
        yield


@pytest.fixture(params=["cpu", "reference"])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each backend in turn, for all ops; the test must have run some op on it."""
    with dispatch.overridden("*", request.param):
        yield request.param
    assert {name for _, name in dispatch.counts} == {request.param}


@pytest.fixture(params=[1, 2], ids=["1 thread", "2 threads"])
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)
