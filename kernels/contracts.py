"""What `ops` checks before it computes: shapes and dtypes always, values when asked to.

Shapes and dtypes cost about half a microsecond a tensor and read no data. Values (ids in range,
lengths that fit) would cost a pass over the index tensors and, on a GPU, a synchronisation; they
are checked under `checked_values()` or with MOORAGE_CHECK_VALUES=1 in the environment, as the tests
do. Unchecked, a wrong id reads or writes another sequence's block.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from moorage.kernels.errors import InvalidArgument

ENVIRONMENT = "MOORAGE_CHECK_VALUES"
"""`1` checks values from the start; read once, at import."""
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""What KV, activations and weights may be. fp64 is for the reference, which tests call directly."""
INTEGERS = (torch.int64,)
"""One type for every index, so that a pool of more than 2³¹ slots is addressed right."""

_state = {"values": os.environ.get(ENVIRONMENT, "") == "1"}


def checks_values() -> bool:
    """Whether values are checked now."""
    return _state["values"]


@contextmanager
def checked_values(on: bool = True) -> Iterator[None]:
    """Check values (or not) for a block of code, in every thread of the process."""
    before = _state["values"]
    _state["values"] = on
    try:
        yield
    finally:
        _state["values"] = before


def shape(op: str, argument: str, tensor: torch.Tensor, *sizes: int | None) -> None:
    """Raise InvalidArgument unless the shape is `sizes`; None is any size."""
    got = tensor.shape
    if len(got) == len(sizes):
        for want, have in zip(sizes, got, strict=True):
            if want is not None and want != have:
                break
        else:
            return
    wanted = "[" + ", ".join("·" if size is None else str(size) for size in sizes) + "]"
    raise InvalidArgument(op, argument, f"of shape {wanted}", list(got))


def dtype(
    op: str, argument: str, tensor: torch.Tensor, dtypes: tuple[torch.dtype, ...] = FLOATS
) -> None:
    """Raise InvalidArgument unless the dtype is one of `dtypes`."""
    if tensor.dtype not in dtypes:
        raise InvalidArgument(op, argument, "one of " + ", ".join(map(str, dtypes)), tensor.dtype)


def indices(op: str, argument: str, tensor: torch.Tensor, *sizes: int | None) -> None:
    """Raise InvalidArgument unless an int64 tensor of this shape."""
    shape(op, argument, tensor, *sizes)
    dtype(op, argument, tensor, INTEGERS)


def within(op: str, argument: str, tensor: torch.Tensor, end: int, distinct: bool = False) -> None:
    """With value checks on, raise InvalidArgument unless all are in [0, end) (and distinct)."""
    if not _state["values"] or not tensor.numel():
        return
    lowest, highest = int(tensor.min()), int(tensor.max())
    if lowest < 0 or highest >= end:
        raise InvalidArgument(op, argument, f"within [0, {end})", f"{lowest} … {highest}")
    if distinct and len(torch.unique(tensor)) != tensor.numel():
        raise InvalidArgument(op, argument, "distinct", tensor.tolist())


def sequences(
    op: str,
    num_rows: int,
    cu_seqlens: torch.Tensor,
    context_lens: torch.Tensor,
    num_slots: int,
) -> None:
    """With value checks on, raise InvalidArgument unless rows and contexts fit.

    `num_slots`: slots that a row of the block table can name.
    """
    if not _state["values"]:
        return
    bounds, lens = cu_seqlens.tolist(), context_lens.tolist()
    counts = [end - start for start, end in zip(bounds, bounds[1:], strict=False)]
    if bounds[0] != 0 or bounds[-1] != num_rows or any(count < 0 for count in counts):
        raise InvalidArgument(op, "cu_seqlens", f"ascending from 0 to {num_rows} rows", bounds)
    for sequence, (count, context_len) in enumerate(zip(counts, lens, strict=True)):
        if count and not count <= context_len <= num_slots:
            raise InvalidArgument(
                op,
                f"context_lens[{sequence}]",
                f"from {count} (its rows) to {num_slots} (its block table's slots)",
                context_len,
            )
