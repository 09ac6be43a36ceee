"""Model families: a checkpoint's own spelling → the generic decoder's records.

One file a family. `model_type` chooses it; `architectures` must agree, because one model type has
heads that are no language models.
"""

from __future__ import annotations

from collections.abc import Container
from pathlib import Path
from typing import Any, Protocol

from moorage.engine.config import ConfigReader, ModelConfig
from moorage.engine.errors import UnsupportedModel
from moorage.engine.families import qwen3_moe
from moorage.engine.families.names import WeightTable


class Family(Protocol):
    """What a family file offers."""

    ARCHITECTURE: str
    """The class name that checkpoints put into `architectures`."""

    def read_config(self, config: ConfigReader) -> ModelConfig:
        """The checkpoint's config as the decoder's. Raises ModelError or UnsupportedModel."""
        ...

    def weight_table(self, config: ModelConfig, stored: Container[str]) -> WeightTable:
        """The decoder's parameter → the checkpoint tensors that fill it.

        `stored` are the names that the checkpoint holds: where a family is written in two
        spellings, they choose.
        """
        ...


_FAMILIES: dict[str, Family] = {"qwen3_moe": qwen3_moe}
"""`model_type` -> family."""


def family_of(values: dict[str, Any], origin: Path) -> Family:
    """The family that a config names. Raises UnsupportedModel listing what there is."""
    architectures = values.get("architectures") or []
    architecture = architectures[0] if isinstance(architectures, list) and architectures else None
    name = values.get("model_type")
    if name is None:
        name = next((n for n, f in _FAMILIES.items() if architecture == f.ARCHITECTURE), None)
    family = _FAMILIES.get(name) if isinstance(name, str) else None
    if family is None or architecture not in (None, family.ARCHITECTURE):
        supported = ", ".join(f"{n} ({f.ARCHITECTURE})" for n, f in sorted(_FAMILIES.items()))
        raise UnsupportedModel(
            f"{origin}: model_type {name!r}, architecture {architecture!r} is not supported;"
            f" supported: {supported}"
        )
    return family


def family_named(name: str) -> Family:
    """The family of a ModelConfig."""
    return _FAMILIES[name]
