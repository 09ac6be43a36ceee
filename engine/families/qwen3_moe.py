"""Qwen3-MoE: GQA with QK norm, softmax router over all experts, SwiGLU experts, no shared expert.

Names and meaning as in Hugging Face's `Qwen3MoeForCausalLM`.
"""

from __future__ import annotations

from moorage.engine.config import AttentionSpec, ConfigReader, LayerSpec, ModelConfig, MoeSpec
from moorage.engine.errors import UnsupportedModel
from moorage.engine.families.names import WeightSource


def read_config(config: ConfigReader) -> ModelConfig:
    """See `Family.read_config`."""
    num_layers = config.integer("num_hidden_layers")
    _refuse_variants(config, num_layers)
    hidden = config.integer("hidden_size")
    num_heads = config.integer("num_attention_heads")
    num_kv_heads = config.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise UnsupportedModel(
            f"num_attention_heads ({num_heads}) is not a multiple of num_key_value_heads ({num_kv_heads})"
        )
    # Newer checkpoints say num_local_experts.
    num_experts = config.integer(
        "num_experts" if config.get("num_experts") is not None else "num_local_experts"
    )
    top_k = config.integer("num_experts_per_tok")
    if top_k > num_experts:
        raise UnsupportedModel(f"num_experts_per_tok ({top_k}) exceeds num_experts ({num_experts})")
    layer = LayerSpec(
        AttentionSpec(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=config.integer("head_dim", hidden // num_heads, low=2),
            qk_norm=True,
            rope_theta=_rope_theta(config),
        ),
        MoeSpec(
            num_experts=num_experts,
            top_k=top_k,
            intermediate=config.integer("moe_intermediate_size"),
            renormalize=config.flag("norm_topk_prob", False),
        ),
    )
    return ModelConfig(
        family="qwen3_moe",
        hidden=hidden,
        layers=(layer,) * num_layers,
        vocab_size=config.integer("vocab_size"),
        context_len=config.integer("max_position_embeddings"),
        norm_eps=config.number("rms_norm_eps", 1e-6),
        tied_embeddings=config.flag("tie_word_embeddings", False),
        checkpoint_dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
    )


def _rope_theta(config: ConfigReader) -> float:
    """Older checkpoints say `rope_theta`, newer ones `rope_parameters`."""
    parameters = config.get("rope_parameters") or config.get("rope_scaling")
    if isinstance(parameters, dict):
        kind = parameters.get("rope_type", parameters.get("type", "default"))
        if kind != "default":
            raise UnsupportedModel(f"rope type {kind!r} is not supported here; supported: default")
        theta = parameters.get("rope_theta")
        if isinstance(theta, int | float) and theta > 0:
            return float(theta)
    return config.number("rope_theta", 10000.0)


def _refuse_variants(config: ConfigReader, num_layers: int) -> None:
    """Options of this family that change the computation and that nobody here computes."""
    if config.get("mlp_only_layers"):
        raise UnsupportedModel("mlp_only_layers is set: dense layers are not supported yet")
    if config.get("decoder_sparse_step") not in (None, 1):
        raise UnsupportedModel(
            f"decoder_sparse_step is {config.get('decoder_sparse_step')}: only 1 (all {num_layers} layers"
            " routed) is supported"
        )
    if config.get("use_sliding_window"):
        raise UnsupportedModel("use_sliding_window is true: sliding windows are not supported yet")
    if config.get("attention_bias"):
        raise UnsupportedModel("attention_bias is true: biases are not supported yet")
    if config.get("hidden_act") not in (None, "silu"):
        raise UnsupportedModel(f"hidden_act is {config.get('hidden_act')!r}, supported: silu")


def weight_table(config: ModelConfig) -> dict[str, WeightSource]:
    """See `Family.weight_table`."""
    hidden, attention = config.hidden, config.attention
    table = {
        "embedding": WeightSource(("model.embed_tokens.weight",), (config.vocab_size, hidden)),
        "final_norm": WeightSource(("model.norm.weight",), (hidden,)),
    }
    if not config.tied_embeddings:
        table["head"] = WeightSource(("lm_head.weight",), (config.vocab_size, hidden))
    query = attention.num_heads * attention.head_dim
    key = attention.num_kv_heads * attention.head_dim
    for index, layer in enumerate(config.layers):
        moe = layer.feed_forward
        theirs, ours = f"model.layers.{index}.", f"layers.{index}."
        experts = [f"{theirs}mlp.experts.{expert}." for expert in range(moe.num_experts)]
        table |= {
            ours + "attention_norm": WeightSource((theirs + "input_layernorm.weight",), (hidden,)),
            ours + "feed_forward_norm": WeightSource(
                (theirs + "post_attention_layernorm.weight",), (hidden,)
            ),
            ours + "query_norm": WeightSource(
                (theirs + "self_attn.q_norm.weight",), (attention.head_dim,)
            ),
            ours + "key_norm": WeightSource(
                (theirs + "self_attn.k_norm.weight",), (attention.head_dim,)
            ),
            ours + "qkv": WeightSource(
                tuple(f"{theirs}self_attn.{part}_proj.weight" for part in "qkv"),
                (query + 2 * key, hidden),
            ),
            ours + "output": WeightSource((theirs + "self_attn.o_proj.weight",), (hidden, query)),
            ours + "router": WeightSource(
                (theirs + "mlp.gate.weight",), (moe.num_experts, hidden)
            ),
            ours + "gate_up": WeightSource(
                tuple(
                    f"{expert}{part}_proj.weight" for expert in experts for part in ("gate", "up")
                ),
                (moe.num_experts, 2 * moe.intermediate, hidden),
                stack=moe.num_experts,
            ),
            ours + "down": WeightSource(
                tuple(f"{expert}down_proj.weight" for expert in experts),
                (moe.num_experts, hidden, moe.intermediate),
                stack=moe.num_experts,
            ),
        }
    return table
