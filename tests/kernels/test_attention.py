"""Paged attention: against fp64, bit-exact in any chunk and batch, and with shifted blocks (case E4)."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from moorage.kernels import dispatch, ops, reference
from moorage.kernels.equivalence import check

NAN = float("nan")
BACKENDS = ["cpu", "reference"]


@dataclass
class Case:
    """Paged KV of several sequences with NaN wherever nothing may be read."""

    heads: int = 8
    kv_heads: int = 2
    dim: int = 32
    block: int = 16
    dtype: torch.dtype = torch.float32
    lengths: tuple[int, ...] = (70,)
    seed: int = 0

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        needed = [-(-length // self.block) for length in self.lengths]
        order = torch.randperm(sum(needed) + 7, generator=generator).tolist()
        self.kv = torch.full((len(order), 2, self.kv_heads, self.block, self.dim), NAN, dtype=self.dtype)
        self.inv_freq = 10000.0 ** -(torch.arange(0, self.dim, 2, dtype=torch.float64) / self.dim)
        self.tables = torch.zeros((len(self.lengths), max(needed)), dtype=torch.int64)
        self.queries = []
        for sequence, length in enumerate(self.lengths):
            table = [order.pop() for _ in range(needed[sequence])]
            self.tables[sequence, : len(table)] = torch.tensor(table)
            raw = torch.randn((2, length, self.kv_heads, self.dim), generator=generator).to(self.dtype)
            slots = torch.tensor([table[i // self.block] * self.block + i % self.block for i in range(length)])
            keys = ops.apply_rope(raw[0], torch.arange(length), self.inv_freq)
            ops.store_kv(keys, raw[1], self.kv, slots)
            self.queries.append(torch.randn((length, self.heads, self.dim), generator=generator).to(self.dtype))

    def attend(self, *rows: tuple[int, int, int], backend: str = "cpu", wide: bool = False):
        """rows: (sequence, first position, end position) in batch order."""
        query = torch.cat([self.queries[s][a:b] for s, a, b in rows])
        kv = self.kv
        if wide:
            query, kv = query.double(), kv.double()
        index = torch.tensor([s for s, _, _ in rows])
        lengths = torch.tensor([0] + [b - a for _, a, b in rows]).cumsum(0)
        with dispatch.overridden("paged_attention", backend):
            return ops.paged_attention(
                query,
                kv,
                self.tables[index],
                None,
                torch.tensor([b for _, _, b in rows]),
                lengths,
                self.inv_freq,
                self.dim**-0.5,
            )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "block"), [(8, 2, 32, 16), (4, 4, 64, 16), (6, 2, 40, 4), (5, 1, 8, 1), (34, 1, 16, 16)]
)
def test_attention_equals_fp64(backend: str, dtype: torch.dtype, heads: int, kv_heads: int, dim: int, block: int) -> None:
    case = Case(heads, kv_heads, dim, block, dtype, lengths=(41, 1, 17), seed=heads)
    rows = ((0, 0, 41), (1, 0, 1), (2, 5, 17))
    out, lse = case.attend(*rows, backend=backend)
    truth, truth_lse = case.attend(*rows, backend="reference", wide=True)
    assert check(out, truth, dtype).within
    assert check(lse, truth_lse, torch.float32).within
    assert out.dtype == dtype and lse.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("length", [1, 16, 127, 128, 129, 300])
def test_any_chunking_gives_the_same_bits(dtype: torch.dtype, length: int) -> None:
    case = Case(dtype=dtype, lengths=(length,), seed=length)
    whole, whole_lse = case.attend((0, 0, length))
    for chunk in (1, 7, 16, 64):
        parts = [case.attend((0, at, min(at + chunk, length))) for at in range(0, length, chunk)]
        assert torch.equal(torch.cat([out for out, _ in parts]), whole), f"chunk {chunk}"
        assert torch.equal(torch.cat([lse for _, lse in parts]), whole_lse), f"chunk {chunk}"


def test_a_decode_has_the_same_bits_in_any_batch() -> None:
    case = Case(dtype=torch.bfloat16, lengths=(300, 17, 129, 1, 256), seed=9)
    alone = [case.attend((s, n - 1, n))[0] for s, n in enumerate(case.lengths)]
    together, _ = case.attend(*((s, n - 1, n) for s, n in enumerate(case.lengths)))
    assert torch.equal(together, torch.cat(alone))
    mixed, _ = case.attend((2, 100, 129), (0, 299, 300), (4, 0, 256), (1, 16, 17))
    assert torch.equal(mixed[29:30], alone[0])
    assert torch.equal(mixed[28:29], alone[2])
    assert torch.equal(mixed[-1:], alone[1])


def test_no_rows_gives_no_rows() -> None:
    case = Case()
    out, lse = case.attend((0, 10, 10), (0, 10, 11))
    assert out.shape == (1, 8, 32) and bool(torch.isfinite(out).all()) and lse.shape == (1, 8)


def test_parts_over_disjoint_keys_merge_to_the_whole() -> None:
    """Split the keys at a block edge: with the position kept by a delta, the second part alone is a valid part."""
    case = Case(lengths=(64,), seed=3)
    whole, whole_lse = case.attend((0, 63, 64))
    query = case.queries[0][63:64]
    arguments = (torch.tensor([0, 1]), case.inv_freq, case.dim**-0.5)
    # First 32 keys: the query stands at 63, which is visible position 31 of that part and delta −32.
    first = ops.paged_attention(query, case.kv, case.tables[:, :2], torch.full((1, 2), -32), torch.tensor([32]), *arguments)
    # Last 32 keys: visible positions 0 … 31, log positions 32 … 63: delta −32 as well.
    second = ops.paged_attention(query, case.kv, case.tables[:, 2:], torch.full((1, 2), -32), torch.tensor([32]), *arguments)
    out, lse = ops.merge_attention(torch.stack([first[0], second[0]]), torch.stack([first[1], second[1]]))
    assert check(out, whole.double(), torch.float32).within
    assert check(lse, whole_lse.double(), torch.float32).within


def test_a_part_without_keys_does_not_leak_into_a_merge() -> None:
    out = torch.randn(1, 3, 2, 4)
    lse = torch.randn(1, 3, 2)
    empty = torch.full_like(out, NAN), torch.full_like(lse, float("-inf"))
    merged, merged_lse = ops.merge_attention(torch.cat([out, empty[0]]), torch.cat([lse, empty[1]]))
    assert torch.allclose(merged, out[0]) and torch.allclose(merged_lse, lse[0])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rounds", [1, 5])
def test_e4_a_shifted_window_equals_attention_with_explicit_positions(backend: str, rounds: int) -> None:
    """Keep the first 4 and the last 60 of 100 tokens, five times over: no key is rotated twice, no error adds up."""
    block, dim, heads, kv_heads, window = 4, 32, 4, 2, 64
    generator = torch.Generator().manual_seed(rounds)
    inv_freq = 10000.0 ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    total = 64 + 36 * rounds
    keys, values = torch.randn((2, total, kv_heads, dim), generator=generator)
    kv = torch.full((total // block, 2, kv_heads, block, dim), NAN)
    visible = list(range(64))
    """Log index of each visible token."""
    deltas = [0] * (64 // block)
    table = list(range(64 // block))
    log_position = {i: i for i in range(64)}
    written = 0
    for round_ in range(rounds + 1):
        end = 64 + 36 * round_
        for index in range(written, end):  # new tokens are written at their visible position, once
            position = log_position[index]
            turned = ops.apply_rope(keys[index : index + 1], torch.tensor([position]), inv_freq)
            ops.store_kv(turned, values[index : index + 1], kv, torch.tensor([index]))
        written = end
        if round_ == rounds:
            break
        new = list(range(end, end + 36))
        start = len(visible)
        log_position |= {index: start + offset for offset, index in enumerate(new)}
        for index in new:
            turned = ops.apply_rope(keys[index : index + 1], torch.tensor([log_position[index]]), inv_freq)
            ops.store_kv(turned, values[index : index + 1], kv, torch.tensor([index]))
        written = end + 36
        visible = visible + new
        table += [index // block for index in new[::block]]
        deltas += [0] * (36 // block)
        assert len(visible) == 100
        # The middle goes: 4 sinks stay where they are, the last 60 move 36 positions to the left.
        visible = visible[:4] + visible[-60:]
        table = table[:1] + table[-15:]
        deltas = deltas[:1] + [delta - 36 for delta in deltas[-15:]]
        assert visible[:4] == [0, 1, 2, 3]
    query = torch.randn((1, heads, dim), generator=generator)
    with dispatch.overridden("paged_attention", backend):
        out, _ = ops.paged_attention(
            query,
            kv,
            torch.tensor([table]),
            torch.tensor([deltas]),
            torch.tensor([window]),
            torch.tensor([0, 1]),
            inv_freq,
            dim**-0.5,
        )
    # The reference: kept tokens at positions 0 … 63, rotated explicitly; the query stands at 63.
    turned = reference.rotate(keys[visible].double(), torch.arange(window), inv_freq)
    asked = reference.rotate(query.double(), torch.tensor([window - 1]), inv_freq)[0].reshape(kv_heads, -1, dim)
    scores = torch.einsum("tgd,gqd->gqt", turned, asked) * dim**-0.5
    expected = torch.einsum("gqt,tgd->gqd", scores.softmax(-1), values[visible].double()).reshape(1, heads, dim)
    assert float((out.double() - expected).abs().max()) < 1e-4
