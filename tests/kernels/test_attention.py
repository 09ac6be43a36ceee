"""Paged attention: bit-exact in any chunk and batch, merges, NaN, and shifted blocks (case E4)."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from moorage.kernels import ops
from moorage.kernels.cpu import attention as cpu_attention
from moorage.kernels.equivalence import check
from moorage.kernels.equivalence_cases import inverse_frequencies, paged_kv

NAN = float("nan")
DTYPES = [torch.float32, torch.bfloat16]


@dataclass
class Contexts:
    """Paged KV of some sequences, with NaN wherever nothing may be read, and a query for every position."""

    lens: tuple[int, ...]
    heads: int = 8
    kv_heads: int = 2
    dim: int = 32
    block: int = 16
    dtype: torch.dtype = torch.float32
    deltas: bool = False

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(sum(self.lens))
        geometry = (self.kv_heads, self.block, self.dim)
        self.kv, self.tables = paged_kv(generator, self.dtype, self.lens, geometry)
        self.queries = [
            torch.randn((length, self.heads, self.dim), generator=generator).to(self.dtype)
            for length in self.lens
        ]
        self.block_deltas = torch.randint(-2, 1, self.tables.shape, generator=generator) * 36

    def attend(self, *rows: tuple[int, int, int]) -> tuple[torch.Tensor, torch.Tensor]:
        """rows: (sequence, first position, end position) in batch order."""
        index = [sequence for sequence, _, _ in rows]
        return ops.paged_attention(
            torch.cat([self.queries[sequence][start:end] for sequence, start, end in rows]),
            self.kv,
            self.tables[index],
            self.block_deltas[index] if self.deltas else None,
            torch.tensor([end for _, _, end in rows]),
            torch.tensor([0] + [end - start for _, start, end in rows]).cumsum(0),
            inverse_frequencies(self.dim),
            self.dim**-0.5,
        )


@pytest.mark.parametrize("deltas", [False, True], ids=["", "deltas"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", [1, 16, 127, 128, 129, 300])
def test_any_chunking_gives_the_same_bits(
    dtype: torch.dtype, length: int, deltas: bool, num_threads: int
) -> None:
    del num_threads
    contexts = Contexts((length,), dtype=dtype, deltas=deltas)
    whole, whole_lse = contexts.attend((0, 0, length))
    for chunk in (1, 7, 16, 64):
        parts = [
            contexts.attend((0, at, min(at + chunk, length))) for at in range(0, length, chunk)
        ]
        assert torch.equal(torch.cat([out for out, _ in parts]), whole), f"chunk {chunk}"
        assert torch.equal(torch.cat([lse for _, lse in parts]), whole_lse), f"chunk {chunk}"


@pytest.mark.parametrize("heads", [2, 6, 8, 16], ids="{} heads".format)
def test_a_decode_has_the_bits_of_its_row_in_a_prefill_of_64(heads: int) -> None:
    """Groups of 1, 3, 4 and 8 query heads: from one row of a product to eight."""
    contexts = Contexts((520,), heads=heads, dim=40, block=4)
    whole, whole_lse = contexts.attend((0, 456, 520))
    for row in (0, 1, 31, 62, 63):
        out, lse = contexts.attend((0, 456 + row, 457 + row))
        assert torch.equal(out[0], whole[row]) and torch.equal(lse[0], whole_lse[row])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_has_the_same_bits_in_any_batch_at_any_place(dtype: torch.dtype) -> None:
    contexts = Contexts((300, 17, 129, 1, 256), dtype=dtype)
    alone = [contexts.attend((s, n - 1, n))[0] for s, n in enumerate(contexts.lens)]
    together, _ = contexts.attend(*((s, n - 1, n) for s, n in enumerate(contexts.lens)))
    assert torch.equal(together, torch.cat(alone))
    backwards, _ = contexts.attend(
        *((s, contexts.lens[s] - 1, contexts.lens[s]) for s in (4, 3, 2, 1, 0))
    )
    assert torch.equal(backwards, together.flip(0))
    mixed, _ = contexts.attend((2, 100, 129), (0, 299, 300), (4, 0, 256), (1, 16, 17), (3, 0, 1))
    assert torch.equal(mixed[28:30], torch.cat([alone[2], alone[0]]))
    assert torch.equal(mixed[-3:], torch.cat([alone[4], alone[1], alone[3]]))


def test_limits_on_memory_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    contexts = Contexts((300, 300, 299, 40))
    rows = ((0, 0, 300), (1, 299, 300), (2, 298, 299), (3, 39, 40))
    out, lse = contexts.attend(*rows)
    monkeypatch.setattr(cpu_attention, "MAX_SCORES", 1)
    monkeypatch.setattr(cpu_attention, "MAX_LOADED", 1)
    narrow, narrow_lse = contexts.attend(*rows)
    assert torch.equal(out, narrow) and torch.equal(lse, narrow_lse)


def test_a_row_does_not_see_what_comes_after_it() -> None:
    contexts = Contexts((200,))
    before = contexts.attend((0, 0, 200))[0][:150]
    contexts.kv[contexts.tables[0, 10:13]] *= -3.0  # indices 160 … 207
    assert torch.equal(contexts.attend((0, 0, 200))[0][:150], before)
    assert not torch.equal(contexts.attend((0, 0, 200))[0][160:], before[-40:])


def test_no_rows_gives_no_rows(backend: str) -> None:
    contexts = Contexts((70,))
    out, lse = contexts.attend((0, 10, 10), (0, 10, 11), (0, 70, 70))
    assert out.shape == (1, 8, 32) and bool(torch.isfinite(out).all()) and lse.shape == (1, 8)


def test_parts_over_disjoint_keys_merge_to_the_whole(backend: str) -> None:
    """Both halves of a context as parts: the query keeps its angle through the deltas."""
    contexts = Contexts((64,))
    whole, whole_lse = contexts.attend((0, 63, 64))

    def part(blocks: slice) -> tuple[torch.Tensor, torch.Tensor]:
        # The query stands at visible position 31 of a part; at delta −32 its angle is that of 63.
        return ops.paged_attention(
            contexts.queries[0][63:64],
            contexts.kv,
            contexts.tables[:, blocks].contiguous(),
            torch.full((1, 2), -32),
            torch.tensor([32]),
            torch.tensor([0, 1]),
            inverse_frequencies(32),
            32**-0.5,
        )

    (first, first_lse), (second, second_lse) = part(slice(0, 2)), part(slice(2, 4))
    out, lse = ops.merge_attention(
        torch.stack([first, second]), torch.stack([first_lse, second_lse])
    )
    assert check(out, whole.double(), torch.float32).within
    assert check(lse, whole_lse.double(), torch.float32).within
    assert not check(first, whole.double(), torch.float32).within


def test_a_part_without_keys_does_not_leak_into_a_merge(backend: str) -> None:
    out, lse = torch.randn(1, 3, 2, 4), torch.randn(1, 3, 2)
    outs = torch.cat([out, torch.full_like(out, NAN)])
    lses = torch.cat([lse, torch.full_like(lse, -torch.inf)])
    merged, merged_lse = ops.merge_attention(outs, lses)
    assert torch.allclose(merged, out[0]) and torch.allclose(merged_lse, lse[0])
    nothing, nothing_lse = ops.merge_attention(outs[1:], lses[1:])
    assert torch.equal(nothing, torch.zeros(3, 2, 4)) and bool((nothing_lse == -torch.inf).all())


class ShiftedWindow:
    """A one-layer RoPE model in fp32 whose context keeps its first 4 and its last 60 tokens.

    Blocks of 4, so that the cut is at block grain. Keys are rotated once, at their position in the log.
    """

    heads, kv_heads, dim, width, block = 4, 2, 32, 24, 4

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(4)
        self.embeddings = torch.randn((300, self.width), generator=generator)
        self.w_query = torch.randn((self.heads * self.dim, self.width), generator=generator) * 0.3
        self.w_key = torch.randn((self.kv_heads * self.dim, self.width), generator=generator) * 0.3
        self.w_value = (
            torch.randn((self.kv_heads * self.dim, self.width), generator=generator) * 0.3
        )
        self.inv_freq = inverse_frequencies(self.dim)
        self.kv = torch.full((300 // self.block, 2, self.kv_heads, self.block, self.dim), NAN)
        self.log_len = 0
        self.visible: list[int] = []
        """Log position of each visible token."""
        self.table: list[int] = []
        self.deltas: list[int] = []

    def append(self, num_tokens: int) -> torch.Tensor:
        """Forward the next tokens of the log; [num_tokens, H, D]."""
        new = torch.arange(self.log_len, self.log_len + num_tokens)
        x = self.embeddings[new]
        query = ops.linear(x, self.w_query).view(num_tokens, self.heads, self.dim)
        key = ops.linear(x, self.w_key).view(num_tokens, self.kv_heads, self.dim)
        value = ops.linear(x, self.w_value).view(num_tokens, self.kv_heads, self.dim)
        ops.store_kv(ops.apply_rope(key, new, self.inv_freq), value, self.kv, new)
        delta = len(self.visible) - self.log_len
        blocks = range(self.log_len // self.block, (self.log_len + num_tokens) // self.block)
        self.table += blocks
        self.deltas += [delta] * len(blocks)
        self.visible += new.tolist()
        self.log_len += num_tokens
        out, _ = ops.paged_attention(
            query,
            self.kv,
            torch.tensor([self.table]),
            torch.tensor([self.deltas]),
            torch.tensor([len(self.visible)]),
            torch.tensor([0, num_tokens]),
            self.inv_freq,
            self.dim**-0.5,
        )
        return out

    def evict_the_middle(self) -> None:
        """100 visible tokens → the first 4 and the last 60, which move 36 positions to the left."""
        assert len(self.visible) == 100
        gone = [self.table[index] for index in range(1, 10)]
        self.visible = self.visible[:4] + self.visible[-60:]
        self.table = self.table[:1] + self.table[-15:]
        self.deltas = self.deltas[:1] + [delta - 36 for delta in self.deltas[-15:]]
        ops.fill_blocks(self.kv, torch.tensor(gone), NAN)

    def expected(self, num_tokens: int) -> torch.Tensor:
        """Dense attention in fp64 over the kept tokens at positions 0, 1, 2, …, for the last rows."""
        x = self.embeddings[self.visible].double()
        query = (x @ self.w_query.double().T).view(-1, self.heads, self.dim)
        key = (x @ self.w_key.double().T).view(-1, self.kv_heads, self.dim)
        value = (x @ self.w_value.double().T).view(-1, self.kv_heads, self.dim)
        angles = torch.outer(torch.arange(len(x)).double(), self.inv_freq)[:, None]

        def turned(tensor: torch.Tensor) -> torch.Tensor:
            pairs = torch.complex(*tensor.chunk(2, -1)) * torch.polar(
                torch.ones_like(angles), angles
            )
            return torch.cat((pairs.real, pairs.imag), -1)

        shared = self.heads // self.kv_heads
        keys, values = turned(key).repeat_interleave(shared, 1), value.repeat_interleave(shared, 1)
        scores = torch.einsum("qhd,khd->hqk", turned(query), keys) * self.dim**-0.5
        later = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
        weights = scores.masked_fill(later, -torch.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, values)[-num_tokens:]


def test_e4_a_shifted_window_equals_attention_at_the_visible_positions(backend: str) -> None:
    """Five rounds: no key is rotated twice, no error adds up, the sinks stay."""
    window = ShiftedWindow()
    window.append(64)
    errors = []
    for round_ in range(1, 6):
        window.append(36)
        window.evict_the_middle()
        assert window.visible[:4] == [0, 1, 2, 3] and window.table[0] == 0
        assert window.deltas == [0] + [-36 * round_] * 15
        out = window.append(4)
        errors.append(float((out.double() - window.expected(4)).abs().max()))
        # The four leave again, so that each round starts from the 64 kept tokens.
        window.visible, window.table = window.visible[:-4], window.table[:-1]
        window.deltas, window.log_len = window.deltas[:-1], window.log_len - 4
    assert max(errors) < 1e-4, errors
    assert errors[4] < 10 * errors[0] + 1e-7, errors


def test_e4_rows_of_two_angles_run_in_any_chunk() -> None:
    """After a shift the sinks and the window want two angles of one query."""
    window = ShiftedWindow()
    window.append(100)
    window.evict_the_middle()
    out = window.append(16)
    assert float((out.double() - window.expected(16)).abs().max()) < 1e-4
    again = ShiftedWindow()
    again.append(100)
    again.evict_the_middle()
    assert torch.equal(torch.cat([again.append(4) for _ in range(4)]), out)
