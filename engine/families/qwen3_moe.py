"""Qwen3-MoE: GQA with QK norm, softmax router over all experts, SwiGLU experts, no shared expert.

Names, defaults and meaning as in Hugging Face's `Qwen3MoeForCausalLM` (read at version 5.24). Sizes
that the class would guess are required here: a checkpoint always states them, and a guess that is
wrong loads and talks nonsense.
"""

from __future__ import annotations

from collections.abc import Container

from moorage.engine.config import (
    AttentionSpec,
    ConfigReader,
    DenseSpec,
    LayerSpec,
    ModelConfig,
    MoeSpec,
    is_positive_number,
)
from moorage.engine.errors import UnsupportedModel
from moorage.engine.families.names import WeightSource, WeightTable

ARCHITECTURE: str = "Qwen3MoeForCausalLM"

_EMBEDDING = "model.embed_tokens.weight"
_HEAD = "lm_head.weight"


def read_config(config: ConfigReader) -> ModelConfig:
    """See `Family.read_config`."""
    _refuse_variants(config)
    num_layers = config.integer("num_hidden_layers", high=4096)
    attention = _attention(config)
    sparse, dense = _moe(config), _dense(config, num_layers)
    return ModelConfig(
        family="qwen3_moe",
        hidden=config.integer("hidden_size"),
        layers=tuple(
            LayerSpec(attention, dense.get(index) or sparse) for index in range(num_layers)
        ),
        vocab_size=config.integer("vocab_size"),
        context_len=config.integer("max_position_embeddings"),
        norm_eps=config.number("rms_norm_eps", 1e-6),
        tied_embeddings=config.flag("tie_word_embeddings", False),
        # Newer checkpoints say `dtype`.
        checkpoint_dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
    )


def _attention(config: ConfigReader) -> AttentionSpec:
    hidden = config.integer("hidden_size")
    num_heads = config.integer("num_attention_heads")
    num_kv_heads = config.integer("num_key_value_heads")
    if num_heads % num_kv_heads:
        raise UnsupportedModel(
            f"{config.origin}: num_attention_heads ({num_heads}) is not a multiple of"
            f" num_key_value_heads ({num_kv_heads})"
        )
    if config.get("head_dim") is None and hidden % num_heads:
        raise UnsupportedModel(
            f"{config.origin}: hidden_size ({hidden}) is not a multiple of num_attention_heads"
            f" ({num_heads}), and head_dim is not given"
        )
    head_dim = config.integer("head_dim", hidden // num_heads)
    if head_dim % 2:
        raise UnsupportedModel(
            f"{config.origin}: head_dim ({head_dim}) is odd; rotation turns pairs"
        )
    return AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        qk_norm=True,
        rope_theta=_rope_theta(config),
    )


def _moe(config: ConfigReader) -> MoeSpec:
    # Newer checkpoints say num_local_experts.
    name = "num_experts" if config.get("num_experts") is not None else "num_local_experts"
    num_experts = config.integer(name, high=65536)
    top_k = config.integer("num_experts_per_tok")
    if top_k > num_experts:
        raise UnsupportedModel(
            f"{config.origin}: num_experts_per_tok ({top_k}) exceeds {name} ({num_experts})"
        )
    return MoeSpec(
        num_experts=num_experts,
        top_k=top_k,
        intermediate=config.integer("moe_intermediate_size"),
        renormalize=config.flag("norm_topk_prob", False),
    )


def _dense(config: ConfigReader, num_layers: int) -> dict[int, DenseSpec]:
    """Layer index -> its spec, for the layers that are not routed."""
    listed = config.get("mlp_only_layers") or []
    if not isinstance(listed, list) or any(type(index) is not int for index in listed):
        raise UnsupportedModel(
            f"{config.origin}: mlp_only_layers is {listed!r}, expected a list of layer indices"
        )
    every = config.integer("decoder_sparse_step", 1)
    indices = [i for i in range(num_layers) if i in listed or (i + 1) % every]
    if not indices:
        return {}  # intermediate_size is read only where it counts
    return dict.fromkeys(indices, DenseSpec(config.integer("intermediate_size")))


def _rope_theta(config: ConfigReader) -> float:
    """Older checkpoints say `rope_theta` and `rope_scaling`, newer ones `rope_parameters`."""
    for name in ("rope_parameters", "rope_scaling"):
        parameters = config.get(name)
        if not parameters:
            continue
        if not isinstance(parameters, dict):
            raise UnsupportedModel(f"{config.origin}: {name} is {parameters!r}, expected an object")
        kind = parameters.get("rope_type", parameters.get("type", "default"))
        if kind != "default":
            raise UnsupportedModel(
                f"{config.origin}: {name} has rope type {kind!r}, supported: default"
            )
        known = {"rope_type", "type", "rope_theta"}
        if parameters.get("partial_rotary_factor") == 1:
            known.add("partial_rotary_factor")
        unknown = sorted(parameters.keys() - known)
        if unknown:
            raise UnsupportedModel(f"{config.origin}: {name} has {', '.join(unknown)}: unsupported")
        theta = parameters.get("rope_theta")
        if theta is not None:
            if not is_positive_number(theta):
                raise UnsupportedModel(
                    f"{config.origin}: {name}.rope_theta is {theta!r}, expected a number above 0"
                )
            return float(theta)
    return config.number("rope_theta", 10000.0)


def _refuse_variants(config: ConfigReader) -> None:
    """Options of this family that change the computation and that nobody here computes."""
    for name in ("use_sliding_window", "attention_bias"):
        if config.flag(name, False):
            raise UnsupportedModel(f"{config.origin}: {name} is true, supported: false")
    if config.get("hidden_act") not in (None, "silu"):
        raise UnsupportedModel(
            f"{config.origin}: hidden_act is {config.get('hidden_act')!r}, supported: silu"
        )
    if config.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise UnsupportedModel(
            f"{config.origin}: partial_rotary_factor is {config.get('partial_rotary_factor')!r},"
            " supported: 1"
        )
    if config.get("quantization_config") is not None:
        raise UnsupportedModel(
            f"{config.origin}: quantization_config is set: quantised checkpoints are not supported,"
            " use the bf16 one"
        )
    others = sorted({str(kind) for kind in config.get("layer_types") or ()} - {"full_attention"})
    if others:
        raise UnsupportedModel(
            f"{config.origin}: layer_types has {', '.join(others)}, supported: full_attention"
        )


def weight_table(config: ModelConfig, stored: Container[str]) -> WeightTable:
    """See `Family.weight_table`."""
    hidden = config.hidden
    parameters = {
        "embedding": WeightSource((_EMBEDDING,), (config.vocab_size, hidden)),
        "final_norm": WeightSource(("model.norm.weight",), (hidden,)),
    }
    if not config.tied_embeddings:
        parameters["head"] = WeightSource((_HEAD,), (config.vocab_size, hidden))
    for index, layer in enumerate(config.layers):
        theirs = f"model.layers.{index}."
        named = _attention_weights(theirs + "self_attn.", hidden, layer.attention)
        named["attention_norm"] = WeightSource((theirs + "input_layernorm.weight",), (hidden,))
        named["feed_forward_norm"] = WeightSource(
            (theirs + "post_attention_layernorm.weight",), (hidden,)
        )
        spec = layer.feed_forward
        if isinstance(spec, MoeSpec):
            named |= _moe_weights(theirs + "mlp.", hidden, spec, stored)
        else:
            named |= _dense_weights(theirs + "mlp.", hidden, spec)
        parameters |= {f"layers.{index}.{name}": source for name, source in named.items()}
    return WeightTable(parameters, {_HEAD: _EMBEDDING} if config.tied_embeddings else {})


def _attention_weights(prefix: str, hidden: int, spec: AttentionSpec) -> dict[str, WeightSource]:
    query = spec.num_heads * spec.head_dim
    key = spec.num_kv_heads * spec.head_dim
    return {
        "query_norm": WeightSource((prefix + "q_norm.weight",), (spec.head_dim,)),
        "key_norm": WeightSource((prefix + "k_norm.weight",), (spec.head_dim,)),
        "qkv": WeightSource(
            tuple(f"{prefix}{part}_proj.weight" for part in "qkv"), (query + 2 * key, hidden)
        ),
        "output": WeightSource((prefix + "o_proj.weight",), (hidden, query)),
    }


def _dense_weights(prefix: str, hidden: int, spec: DenseSpec) -> dict[str, WeightSource]:
    return {
        "gate_up": WeightSource(
            (prefix + "gate_proj.weight", prefix + "up_proj.weight"),
            (2 * spec.intermediate, hidden),
        ),
        "down": WeightSource((prefix + "down_proj.weight",), (hidden, spec.intermediate)),
    }


def _moe_weights(
    prefix: str, hidden: int, spec: MoeSpec, stored: Container[str]
) -> dict[str, WeightSource]:
    gate_up = (spec.num_experts, 2 * spec.intermediate, hidden)
    down = (spec.num_experts, hidden, spec.intermediate)
    weights = {"router": WeightSource((prefix + "gate.weight",), (spec.num_experts, hidden))}
    fused = prefix + "experts.gate_up_proj"
    if fused in stored:  # transformers 5's own layout, which is ours
        weights["gate_up"] = WeightSource((fused,), gate_up)
        weights["down"] = WeightSource((prefix + "experts.down_proj",), down)
        return weights
    experts = [f"{prefix}experts.{expert}." for expert in range(spec.num_experts)]
    weights["gate_up"] = WeightSource(
        tuple(f"{expert}{part}_proj.weight" for expert in experts for part in ("gate", "up")),
        gate_up,
        stack=spec.num_experts,
    )
    weights["down"] = WeightSource(
        tuple(f"{expert}down_proj.weight" for expert in experts), down, stack=spec.num_experts
    )
    return weights
