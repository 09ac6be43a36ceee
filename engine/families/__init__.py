"""Model families: a checkpoint's own spelling → the generic decoder's records. One file a family."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from moorage.engine.config import ConfigReader, ModelConfig
from moorage.engine.errors import UnsupportedModel
from moorage.engine.families import qwen3_moe
from moorage.engine.families.names import WeightSource


class Family(Protocol):
    """What a family file offers."""

    def read_config(self, config: ConfigReader) -> ModelConfig:
        """The checkpoint's config as the decoder's. Raises ModelError or UnsupportedModel."""
        ...

    def weight_table(self, config: ModelConfig) -> dict[str, WeightSource]:
        """The decoder's parameter → the checkpoint tensors that fill it."""
        ...


_FAMILIES: dict[str, Family] = {"qwen3_moe": qwen3_moe}


def family_of(values: dict[str, Any], origin: Path) -> Family:
    """The family that `model_type` names. Raises UnsupportedModel listing what there is."""
    name = values.get("model_type")
    family = _FAMILIES.get(name) if isinstance(name, str) else None
    if family is None:
        raise UnsupportedModel(
            f"{origin}: model_type {name!r} is not supported; supported: {', '.join(sorted(_FAMILIES))}"
        )
    return family


def family_named(name: str) -> Family:
    """The family of a ModelConfig."""
    return _FAMILIES[name]
