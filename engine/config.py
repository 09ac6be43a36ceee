"""A model's shape: what the generic decoder needs to know, read from a checkpoint's `config.json`.

The decoder knows layer *kinds*, not model names; a family file (`engine/families/`) maps a checkpoint's own spelling to
these records.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moorage.engine.errors import ModelError


@dataclass(frozen=True)
class AttentionSpec:
    """Grouped-query attention with rotary positions."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    qk_norm: bool
    """RMS norm over each head of query and key before rotation."""
    rope_theta: float


@dataclass(frozen=True)
class MoeSpec:
    """A routed feed-forward layer; SwiGLU experts."""

    num_experts: int
    top_k: int
    intermediate: int
    renormalize: bool
    """Whether the chosen weights are scaled to sum to 1."""


@dataclass(frozen=True)
class LayerSpec:
    """One decoder layer: pre-norm attention, pre-norm feed-forward, residual around each."""

    attention: AttentionSpec
    feed_forward: MoeSpec


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only model."""

    family: str
    hidden: int
    layers: tuple[LayerSpec, ...]
    vocab_size: int
    context_len: int
    """Tokens."""
    norm_eps: float
    tied_embeddings: bool
    checkpoint_dtype: str
    """"bfloat16", "float16" or "float32" as the checkpoint names it."""

    @property
    def attention(self) -> AttentionSpec:
        """The attention shape, which all layers of one cache group share."""
        return self.layers[0].attention

    def canonical(self) -> dict[str, Any]:
        """Plain values that name the shape; part of the model fingerprint."""
        first = self.layers[0]
        return {
            "family": self.family,
            "hidden": self.hidden,
            "num_layers": len(self.layers),
            "vocab_size": self.vocab_size,
            "norm_eps": self.norm_eps,
            "tied_embeddings": self.tied_embeddings,
            "attention": vars(first.attention),
            "feed_forward": vars(first.feed_forward),
        }


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a model file. Raises ModelError naming the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(
            f"{path.name} is missing in {path.parent}: --model must name a folder with Hugging Face's files"
        ) from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds a {type(value).__name__}, expected a JSON object")
    return value


class ConfigReader:
    """Typed look-ups in a checkpoint's config, so that a missing or absurd value is named."""

    def __init__(self, values: dict[str, Any], origin: Path) -> None:
        self._values = values
        self._origin = origin

    def integer(self, name: str, default: int | None = None, *, low: int = 1) -> int:
        """An integer of at least `low`."""
        value = self._values.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise ModelError(f"{self._origin}: {name} is {value!r}, expected an integer ≥ {low}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A positive number."""
        value = self._values.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise ModelError(f"{self._origin}: {name} is {value!r}, expected a number above 0")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """A boolean."""
        value = self._values.get(name, default)
        if not isinstance(value, bool):
            raise ModelError(f"{self._origin}: {name} is {value!r}, expected true or false")
        return value

    def get(self, name: str) -> Any:
        """The raw value, None where it is absent."""
        return self._values.get(name)


def load_model_config(model_dir: Path) -> ModelConfig:
    """The config of a checkpoint folder. Raises ModelError or UnsupportedModel, each naming what is wrong."""
    from moorage.engine.families import family_of  # noqa: PLC0415  (families build on these records)

    path = model_dir / "config.json"
    values = read_json(path)
    return family_of(values, path).read_config(ConfigReader(values, path))
