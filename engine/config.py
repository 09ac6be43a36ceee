"""A model's shape: what the generic decoder needs to know, read from a checkpoint's `config.json`.

The decoder knows layer *kinds*, not model names; a family file (`engine/families/`) maps a
checkpoint's own spelling to these records. Whatever a record cannot say is refused by name: an
option that is read and ignored would give fluent, wrong text.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from moorage.engine.errors import ModelError

MAX_INTEGER = 1 << 31
"""No size in a real config comes near it; it keeps products of two sizes within 64 bits."""


@dataclass(frozen=True)
class AttentionSpec:
    """Grouped-query attention with rotary positions (Ainslie et al. 2023; Su et al. 2021)."""

    num_heads: int
    num_kv_heads: int
    """Divides num_heads; query head h reads KV head h // (num_heads / num_kv_heads)."""
    head_dim: int
    """Even: rotation turns pairs."""
    qk_norm: bool
    """RMS norm over each head of query and key before rotation."""
    rope_theta: float
    """Base of the rotation frequencies."""


@dataclass(frozen=True)
class MoeSpec:
    """A routed feed-forward layer; every expert is a SwiGLU."""

    num_experts: int
    top_k: int
    """Experts per token; at most num_experts."""
    intermediate: int
    """Width of one expert."""
    renormalize: bool
    """Whether the chosen weights are scaled to sum to 1 (case I1)."""


@dataclass(frozen=True)
class DenseSpec:
    """A SwiGLU feed-forward layer that every token takes (Shazeer 2020)."""

    intermediate: int


@dataclass(frozen=True)
class LayerSpec:
    """One decoder layer: pre-norm attention, pre-norm feed-forward, residual around each."""

    attention: AttentionSpec
    feed_forward: MoeSpec | DenseSpec


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only model."""

    family: str
    """Key of the registry in `engine/families/`."""
    hidden: int
    """Width of the residual stream."""
    layers: tuple[LayerSpec, ...]
    """At least one; all attention specs are equal (one KV group)."""
    vocab_size: int
    """Rows of the embedding; the tokenizer may know fewer."""
    context_len: int
    """Tokens."""
    norm_eps: float
    tied_embeddings: bool
    """The output head is the embedding."""
    checkpoint_dtype: str
    """ "bfloat16", "float16" or "float32", as the checkpoint names it."""

    @property
    def attention(self) -> AttentionSpec:
        """The attention shape, which all layers of one cache group share."""
        return self.layers[0].attention

    def canonical(self) -> dict[str, Any]:
        """Plain values that name the shape; part of the model fingerprint.

        Without `context_len` and `checkpoint_dtype`: neither changes what KV holds.
        """
        return {
            "family": self.family,
            "hidden": self.hidden,
            "vocab_size": self.vocab_size,
            "norm_eps": self.norm_eps,
            "tied_embeddings": self.tied_embeddings,
            "layers": [
                [
                    asdict(layer.attention),
                    type(layer.feed_forward).__name__,
                    asdict(layer.feed_forward),
                ]
                for layer in self.layers
            ],
        }


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a model file. Raises ModelError naming the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(
            f"{path.name} is missing in {path.parent}: --model must name a folder with"
            " Hugging Face's files"
        ) from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds a {type(value).__name__}, expected a JSON object")
    return value


class ConfigReader:
    """Typed look-ups in a checkpoint's config, so that a missing or absurd value is named."""

    def __init__(self, values: dict[str, Any], origin: Path) -> None:
        self._values = values
        self.origin = origin

    def integer(
        self, name: str, default: int | None = None, *, low: int = 1, high: int = MAX_INTEGER
    ) -> int:
        """An integer in [low, high]. A `default` of None makes it required."""
        value = self._or_default(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ModelError(
                f"{self.origin}: {name} is {value!r}, expected an integer in {low} … {high}"
            )
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number above 0."""
        value = self._or_default(name, default)
        if not is_positive_number(value):
            raise ModelError(
                f"{self.origin}: {name} is {value!r}, expected a finite number above 0"
            )
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """A boolean."""
        value = self._or_default(name, default)
        if not isinstance(value, bool):
            raise ModelError(f"{self.origin}: {name} is {value!r}, expected true or false")
        return value

    def get(self, name: str) -> Any:
        """The raw value, None where it is absent."""
        return self._values.get(name)

    def _or_default(self, name: str, default: Any) -> Any:
        value = self._values.get(name)
        return default if value is None else value


def is_positive_number(value: Any) -> bool:
    """Whether a JSON value is a finite number above 0."""
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and math.isfinite(value)
        and value > 0
    )


def load_model_config(model_dir: Path) -> ModelConfig:
    """The config of a checkpoint folder.

    Raises ModelError for a missing or absurd value, UnsupportedModel for an option that nobody
    here computes; each names the file, the key and the value.
    """
    from moorage.engine.families import family_of  # families build on these records

    path = model_dir / "config.json"
    values = read_json(path)
    # pyright knows this file by its folder's name too and takes the two names for two types.
    reader = ConfigReader(values, path)
    return family_of(values, path).read_config(reader)  # pyright: ignore
