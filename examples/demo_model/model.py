"""Qwen3-MoE in plain torch, for training: computes what transformers' Qwen3MoeForCausalLM does.

Weights are fp32; matrix products run in `compute` (bf16 for training, fp32 to measure). The
residual stream, the router and the loss are fp32. The experts of a layer are three stacked
matrices; `hugging_face_views` gives everything its Hugging Face name. The short parameter names are
those of the checkpoints.

Shapes: B rows, T positions, H hidden, D head_dim, E experts, K experts a token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Past = tuple[Tensor, Tensor]
"""Keys and values of one layer, each [B, kv_heads, positions, D]."""
INIT_STD = 0.02


@dataclass(frozen=True)
class Shape:
    """Shape of the model."""

    vocab: int = 2560
    hidden: int = 256
    layers: int = 4
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 32
    experts: int = 8
    top_k: int = 2
    inter: int = 384
    """Inner width of one expert."""
    theta: float = 100000.0
    """Base of the rotary frequencies."""
    eps: float = 1e-6
    context: int = 4096
    """Positions."""

    def hugging_face(self) -> dict[str, Any]:
        """All fields of `config.json`."""
        return {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": 4 * self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": self.context,
            "initializer_range": INIT_STD,
            "rms_norm_eps": self.eps,
            "use_cache": True,
            "tie_word_embeddings": True,
            "rope_theta": self.theta,
            "attention_bias": False,
            "use_sliding_window": False,
            "decoder_sparse_step": 1,
            "moe_intermediate_size": self.inter,
            "num_experts_per_tok": self.top_k,
            "num_experts": self.experts,
            "norm_topk_prob": True,
            "output_router_logits": False,
            "router_aux_loss_coef": 0.01,
            "mlp_only_layers": [],
            "eos_token_id": 2,
            "pad_token_id": 0,
            "bos_token_id": None,
            "torch_dtype": "bfloat16",
        }

    @classmethod
    def from_hugging_face(cls, config: dict[str, Any]) -> Shape:
        """The inverse of `hugging_face`."""
        return cls(
            vocab=config["vocab_size"],
            hidden=config["hidden_size"],
            layers=config["num_hidden_layers"],
            heads=config["num_attention_heads"],
            kv_heads=config["num_key_value_heads"],
            head_dim=config["head_dim"],
            experts=config["num_experts"],
            top_k=config["num_experts_per_tok"],
            inter=config["moe_intermediate_size"],
            theta=config["rope_theta"],
            eps=config["rms_norm_eps"],
            context=config["max_position_embeddings"],
        )


def linear(x: Tensor, weight: Tensor, compute: torch.dtype) -> Tensor:
    """x [..., in] times weight [out, in], in `compute`."""
    return F.linear(x.to(compute), weight.to(compute))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last axis, in the type of x."""
    return F.rms_norm(x, (x.shape[-1],), weight.to(x.dtype), eps)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate-half RoPE of x [B, T, heads, D], returned as [B, heads, T, D]."""
    left, right = x.chunk(2, -1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), -1).transpose(1, 2)


def _normal(*shape: int, std: float = INIT_STD) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape) * std)


class Layer(nn.Module):
    """Pre-norm attention and experts on an fp32 residual stream."""

    def __init__(self, shape: Shape, compute: torch.dtype) -> None:
        super().__init__()
        self.shape, self.compute = shape, compute
        hidden, queries = shape.hidden, shape.heads * shape.head_dim
        keys = shape.kv_heads * shape.head_dim
        out_std = INIT_STD / (2 * shape.layers) ** 0.5  # keeps the residual stream's scale
        self.ln1 = nn.Parameter(torch.ones(hidden))
        self.ln2 = nn.Parameter(torch.ones(hidden))
        self.qn = nn.Parameter(torch.ones(shape.head_dim))
        self.kn = nn.Parameter(torch.ones(shape.head_dim))
        self.q = _normal(queries, hidden)
        self.k = _normal(keys, hidden)
        self.v = _normal(keys, hidden)
        self.o = _normal(hidden, queries, std=out_std)
        self.router = _normal(shape.experts, hidden)
        self.gate = _normal(shape.experts, shape.inter, hidden)
        self.up = _normal(shape.experts, shape.inter, hidden)
        self.down = _normal(shape.experts, hidden, shape.inter, std=out_std)

    def _linear(self, x: Tensor, weight: Tensor) -> Tensor:
        return linear(x, weight, self.compute)

    def attention(
        self, x: Tensor, cos: Tensor, sin: Tensor, past: Past | None
    ) -> tuple[Tensor, Past]:
        """x [B, T, H] -> (out [B, T, H], keys and values with those of the past).

        All rows must have the same past: there is no padding mask.
        """
        shape = self.shape
        rows, length, _ = x.shape
        q = self._linear(x, self.q).view(rows, length, shape.heads, shape.head_dim)
        k = self._linear(x, self.k).view(rows, length, shape.kv_heads, shape.head_dim)
        v = self._linear(x, self.v).view(rows, length, shape.kv_heads, shape.head_dim)
        q = rotate(rms_norm(q, self.qn, shape.eps), cos, sin)
        k = rotate(rms_norm(k, self.kn, shape.eps), cos, sin)
        v = v.transpose(1, 2)
        mask: Tensor | None = None
        if past is not None:
            k, v = torch.cat((past[0], k), 2), torch.cat((past[1], v), 2)
            before = k.shape[2] - length
            mask = torch.ones(length, k.shape[2], dtype=torch.bool).tril(before)
        kept = (k, v)
        group = shape.heads // shape.kv_heads
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return self._linear(out.transpose(1, 2).reshape(rows, length, -1), self.o), kept

    def experts(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [tokens, H] -> (out fp32 [tokens, H], aux loss, load [E]).

        Each expert computes only the tokens routed to it. `load` is an expert's share of all
        choices; the aux loss, E times the sum of share times mean probability, is 1 when the
        load is balanced (Fedus et al. 2021, arXiv:2101.03961, equation 4, for K choices).
        """
        shape = self.shape
        probabilities = F.linear(x.float(), self.router).softmax(-1)
        weights, chosen = probabilities.topk(shape.top_k, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        flat = chosen.reshape(-1)
        order = flat.argsort(stable=True)
        source = order // shape.top_k
        counts = torch.bincount(flat, minlength=shape.experts)
        parts = torch.split(x.to(self.compute).index_select(0, source), counts.tolist())
        outs: list[Tensor] = []
        for expert, part in enumerate(parts):
            gated = F.silu(self._linear(part, self.gate[expert]))
            inner = gated * self._linear(part, self.up[expert])
            outs.append(self._linear(inner, self.down[expert]))
        scaled = torch.cat(outs) * weights.reshape(-1)[order].unsqueeze(-1)
        out = torch.zeros(x.shape).index_add(0, source, scaled)
        load = counts.float() / flat.numel()
        aux = shape.experts * (load * probabilities.mean(0)).sum()
        return out, aux, load

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, past: Past | None
    ) -> tuple[Tensor, Past, Tensor, Tensor]:
        """x fp32 [B, T, H] -> (x, keys and values, aux loss, load [E])."""
        normed = rms_norm(x, self.ln1, self.shape.eps).to(self.compute)
        out, kept = self.attention(normed, cos, sin, past)
        x = x + out
        normed = rms_norm(x, self.ln2, self.shape.eps).to(self.compute)
        out, aux, load = self.experts(normed.flatten(0, 1))
        return x + out.view(x.shape), kept, aux, load


@dataclass
class Hidden:
    """What a forward pass gives."""

    states: Tensor
    """fp32 [B, T, H], after the last norm."""
    cache: list[Past]
    aux: Tensor
    """Load-balancing loss, mean over the layers; 1 when balanced."""
    loads: Tensor
    """[layers, E], each expert's share of the choices."""


class Model(nn.Module):
    """The whole causal language model; its head is the embedding matrix."""

    def __init__(self, shape: Shape | None = None, compute: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.shape, self.compute = shape or Shape(), compute
        self.embed = _normal(self.shape.vocab, self.shape.hidden)
        self.layers = nn.ModuleList(Layer(self.shape, compute) for _ in range(self.shape.layers))
        self.norm = nn.Parameter(torch.ones(self.shape.hidden))

    def forward(
        self, ids: Tensor, cache: list[Past] | None = None, positions: Tensor | None = None
    ) -> Hidden:
        """ids int64 [B, T], after the positions of `cache`, or at `positions` [T], ascending."""
        shape = self.shape
        if positions is None:
            start = cache[0][0].shape[2] if cache else 0
            positions = torch.arange(start, start + ids.shape[1])
        half = torch.arange(0, shape.head_dim, 2).double() / shape.head_dim
        angles = torch.outer(positions.double(), 1.0 / shape.theta**half)[None, :, None]
        cos, sin = angles.cos().to(self.compute), angles.sin().to(self.compute)
        x = F.embedding(ids, self.embed)
        kept: list[Past] = []
        auxes: list[Tensor] = []
        loads: list[Tensor] = []
        for index, layer in enumerate(self.layers):
            x, pair, aux, load = layer(x, cos, sin, cache[index] if cache else None)
            kept.append(pair)
            auxes.append(aux)
            loads.append(load)
        states = rms_norm(x, self.norm, shape.eps)
        return Hidden(states, kept, torch.stack(auxes).mean(), torch.stack(loads))

    def logits(self, states: Tensor) -> Tensor:
        """states [..., H] -> fp32 logits [..., vocab]."""
        return linear(states, self.embed, self.compute).float()


_DENSE = {
    "ln1": "input_layernorm",
    "ln2": "post_attention_layernorm",
    "qn": "self_attn.q_norm",
    "kn": "self_attn.k_norm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "router": "mlp.gate",
}
_STACKED = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}


def hugging_face_views(model: Model) -> dict[str, Tensor]:
    """Every weight under its Hugging Face name, sharing the model's memory; the head is tied."""
    views = {"model.embed_tokens.weight": model.embed.data, "model.norm.weight": model.norm.data}
    for index, layer in enumerate(model.layers):
        for own, name in _DENSE.items():
            views[f"model.layers.{index}.{name}.weight"] = layer.get_parameter(own).data
        for own, name in _STACKED.items():
            for expert, matrix in enumerate(layer.get_parameter(own).data):
                views[f"model.layers.{index}.mlp.experts.{expert}.{name}.weight"] = matrix
    return views


def import_weights(model: Model, weights: dict[str, Tensor]) -> None:
    """Copy weights with Hugging Face names into the model. KeyError names a missing one."""
    for name, view in hugging_face_views(model).items():
        view.copy_(weights[name])
