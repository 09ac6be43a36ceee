"""Which backend ran, the override, and argument checks."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from moorage.kernels import contracts, dispatch, ops
from moorage.kernels.errors import InvalidArgument, UnknownBackend


def ids(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def attention_arguments(**changes: object) -> dict[str, object]:
    """A valid call: 2 sequences of 3 and 1 rows, 4 heads on 2 KV heads, 5 blocks of 4."""
    return {
        "query": torch.zeros(4, 4, 8),
        "layer_kv": torch.zeros(5, 2, 2, 4, 8),
        "block_tables": torch.tensor([[1, 2], [3, 0]]),
        "block_deltas": None,
        "context_lens": ids(6, 1),
        "cu_seqlens": ids(0, 3, 4),
        "inv_freq": torch.ones(4, dtype=torch.float64),
        "scale": 1.0,
    } | changes


def test_dispatch_counts_what_ran_and_overrides_end() -> None:
    ops.swiglu(torch.zeros(1, 2))
    with dispatch.overridden("swiglu", "reference"):
        ops.swiglu(torch.zeros(1, 2))
        ops.swiglu(torch.zeros(1, 2))
        ops.rms_norm(torch.zeros(1, 2), torch.ones(2), 1e-6)
    ops.swiglu(torch.zeros(1, 2))
    assert dict(dispatch.counts) == {
        ("swiglu", "cpu"): 2,
        ("swiglu", "reference"): 2,
        ("rms_norm", "cpu"): 1,
    }
    dispatch.counts.clear()
    assert not dispatch.counts


def test_an_op_of_its_own_wins_over_the_star() -> None:
    with dispatch.overridden("*", "reference"), dispatch.overridden("swiglu", "cpu"):
        ops.swiglu(torch.zeros(1, 2))
        ops.rms_norm(torch.zeros(1, 2), torch.ones(2), 1e-6)
    assert dict(dispatch.counts) == {("swiglu", "cpu"): 1, ("rms_norm", "reference"): 1}


def test_unknown_names_are_refused_with_the_known_ones() -> None:
    with pytest.raises(
        UnknownBackend, match=r"swiglu has no backend 'gpu'; there are \['cpu', 'reference'\]"
    ):
        dispatch.override("swiglu", "gpu")
    with pytest.raises(
        UnknownBackend, match="there is no op 'swigl'; ops: apply_rope, copy_blocks"
    ):
        dispatch.override("swigl", "cpu")
    with pytest.raises(UnknownBackend, match=r"swiglu has no backend None for device type 'meta'"):
        ops.swiglu(torch.zeros((1, 2), device="meta"))


def test_the_environment_chooses_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_overrides", {})
    monkeypatch.setenv("MOORAGE_OP_BACKEND", "swiglu=reference, route=cpu,")
    dispatch.read_environment()
    ops.swiglu(torch.zeros(1, 2))
    ops.route(torch.zeros(1, 2), 1, False)
    assert set(dispatch.counts) == {("swiglu", "reference"), ("route", "cpu")}
    monkeypatch.setenv("MOORAGE_OP_BACKEND", "swiglu=fast")
    with pytest.raises(UnknownBackend, match="swiglu has no backend 'fast'"):
        dispatch.read_environment()


def test_the_environment_is_read_at_import() -> None:
    program = (
        "import torch\n"
        "from moorage.kernels import contracts, dispatch, ops\n"
        "ops.swiglu(torch.zeros(1, 2))\n"
        "print(contracts.checks_values(), *dispatch.counts)\n"
    )
    environment = os.environ | {
        "MOORAGE_OP_BACKEND": "*=reference",
        "MOORAGE_CHECK_VALUES": "1",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout.strip() == "True ('swiglu', 'reference')"


def test_wrong_shapes_and_dtypes_name_op_argument_and_sizes() -> None:
    with pytest.raises(InvalidArgument, match=r"linear: x must be of shape \[·, 8\], got \[2, 9\]"):
        ops.linear(torch.zeros(2, 9), torch.zeros(3, 8))
    with pytest.raises(
        InvalidArgument, match=r"linear: weight must be one of torch.float32, got torch.bfloat16"
    ):
        ops.linear(torch.zeros(2, 8), torch.zeros(3, 8).bfloat16())
    with pytest.raises(
        InvalidArgument, match=r"linear: x must be one of torch.float32, .*, got torch.float64"
    ):
        ops.linear(torch.zeros(2, 8).double(), torch.zeros(3, 8).double())
    with pytest.raises(InvalidArgument, match=r"route: top_k must be within 1 … 4, got 5"):
        ops.route(torch.zeros(1, 4), 5, False)
    with pytest.raises(
        InvalidArgument, match=r"route: scoring must be one of softmax, sigmoid, got 'relu'"
    ):
        ops.route(torch.zeros(1, 4), 2, False, "relu")  # type: ignore[arg-type]
    with pytest.raises(
        InvalidArgument, match=r"rms_norm: weight must be of shape \[4\], got \[5\]"
    ):
        ops.rms_norm(torch.zeros(2, 4), torch.ones(5), 1e-6)
    with pytest.raises(
        InvalidArgument, match=r"swiglu: gate_up must be of shape \[M, 2 · I\], got \[2, 3\]"
    ):
        ops.swiglu(torch.zeros(2, 3))
    with pytest.raises(
        InvalidArgument, match=r"apply_rope: positions must be one of torch.int64, got torch.int32"
    ):
        ops.apply_rope(
            torch.zeros(1, 1, 2),
            torch.zeros(1, dtype=torch.int32),
            torch.ones(1, dtype=torch.float64),
        )
    with pytest.raises(
        InvalidArgument, match=r"gather_blocks: out must be of shape \[2, 3\], got \[1, 3\]"
    ):
        ops.gather_blocks(torch.zeros(4, 3), ids(0, 1), torch.zeros(1, 3))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query": torch.zeros(4, 3, 8)}, r"query heads must be a multiple of 2 KV heads, got 3"),
        ({"layer_kv": torch.zeros(5, 2, 2, 4, 6)}, r"layer_kv must be of shape \[·, 2, ·, ·, 8\]"),
        (
            {"layer_kv": torch.zeros(5, 2, 2, 4, 8).bfloat16()},
            r"layer_kv must be one of torch.float32",
        ),
        (
            {"block_tables": torch.zeros(3, 2, dtype=torch.int64)},
            r"block_tables must be of shape \[2, ·\]",
        ),
        (
            {"block_deltas": torch.zeros(2, 3, dtype=torch.int64)},
            r"block_deltas must be of shape \[2, 2\]",
        ),
        ({"cu_seqlens": ids(0, 4)}, r"cu_seqlens must be of shape \[3\], got \[2\]"),
        ({"inv_freq": torch.ones(4)}, r"inv_freq must be one of torch.float64"),
        (
            {"block_tables": torch.tensor([[1, 5], [3, 0]])},
            r"block_tables must be within \[0, 5\), got 0 … 5",
        ),
        (
            {"cu_seqlens": ids(0, 3, 5)},
            r"cu_seqlens must be ascending from 0 to 4 rows, got \[0, 3, 5\]",
        ),
        (
            {"cu_seqlens": ids(0, 5, 4)},
            r"cu_seqlens must be ascending from 0 to 4 rows, got \[0, 5, 4\]",
        ),
        (
            {"context_lens": ids(2, 1)},
            r"context_lens\[0\] must be from 3 \(its rows\) to 8 .*, got 2",
        ),
        (
            {"context_lens": ids(6, 9)},
            r"context_lens\[1\] must be from 1 \(its rows\) to 8 .*, got 9",
        ),
    ],
)
def test_attention_refuses_what_does_not_fit(changes: dict[str, object], message: str) -> None:
    ops.paged_attention(**attention_arguments())  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="paged_attention: " + message):
        ops.paged_attention(**attention_arguments(**changes))  # type: ignore[arg-type]
    assert dict(dispatch.counts) == {("paged_attention", "cpu"): 1}


def test_values_are_checked_only_when_asked_to() -> None:
    key = torch.zeros(2, 1, 2)
    kv = torch.zeros(3, 2, 1, 4, 2)
    with pytest.raises(
        InvalidArgument, match=r"store_kv: slot_mapping must be distinct, got \[5, 5\]"
    ):
        ops.store_kv(key, key, kv, ids(5, 5))
    with pytest.raises(
        InvalidArgument, match=r"store_kv: slot_mapping must be within \[0, 12\), got 5 … 12"
    ):
        ops.store_kv(key, key, kv, ids(5, 12))
    with pytest.raises(
        InvalidArgument, match=r"fill_blocks: block_ids must be within \[0, 3\), got -1 … -1"
    ):
        ops.fill_blocks(kv, ids(-1), 0.0)
    with pytest.raises(
        InvalidArgument, match=r"moe_experts: expert_ids must be within \[0, 2\), got 2 … 2"
    ):
        ops.moe_experts(
            torch.zeros(1, 4),
            torch.ones(1, 1),
            ids(2)[None],
            torch.zeros(2, 6, 4),
            torch.zeros(2, 4, 3),
        )
    with contracts.checked_values(False):
        assert not contracts.checks_values()
        ops.store_kv(key, key, kv, ids(5, 5))
    assert contracts.checks_values()
