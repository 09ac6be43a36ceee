"""Checkpoint folder → parameters: memory-mapped safetensors, every tensor once, complete both ways or refused."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from moorage.engine.config import ModelConfig, read_json
from moorage.engine.errors import WeightsError
from moorage.engine.families import family_named
from moorage.engine.families.names import WeightSource

NUMERICS_PROFILE = "fp32-router,fp32-accumulate,rotated-keys-1"
"""Names what the arithmetic promises; part of the fingerprint, so KV of other arithmetic is a miss."""
_LISTED = 8


@dataclass(frozen=True)
class Weights:
    """Parameters by our names, and a digest of the checkpoint's content."""

    parameters: dict[str, torch.Tensor]
    digest: bytes
    num_bytes: int


def load_weights(model_dir: Path, config: ModelConfig, dtype: torch.dtype) -> Weights:
    """Read every tensor once into parameters of `dtype`.

    Raises WeightsError that names the file or the tensors for: a missing or damaged shard, a tensor that nobody asked
    for, a parameter that nothing fills, another shape, and values that are not numbers.
    """
    files = _shards(model_dir)
    table = family_named(config.family).weight_table(config)
    with ExitStack() as stack:
        where: dict[str, Any] = {}
        for path in files:
            handle = stack.enter_context(_open(path))
            for name in handle.keys():  # noqa: SIM118  (not a dict)
                if name in where:
                    raise WeightsError(f"{name} stands in more than one file; the second is {path.name}")
                where[name] = handle
        _check_complete(table, where, config, model_dir)
        digest = blake2b(digest_size=16, person=b"moorage.weights")
        parameters = {
            ours: _fill(ours, source, where, dtype, digest) for ours, source in sorted(table.items())
        }
    return Weights(
        parameters,
        digest.digest(),
        sum(tensor.numel() * tensor.element_size() for tensor in parameters.values()),
    )


def model_fingerprint(config: ModelConfig, digest: bytes, dtype: torch.dtype, run_key: str) -> bytes:
    """16 bytes that name everything KV depends on beside its tokens: weights, shape, numerics, run size.

    Build, instruction set and parallel layout are not in it: KV moves between them within the stated tolerance.
    """
    named = json.dumps(
        [config.canonical(), digest.hex(), str(dtype), NUMERICS_PROFILE, run_key], sort_keys=True
    )
    return blake2b(named.encode(), digest_size=16, person=b"moorage.model").digest()


def _shards(model_dir: Path) -> list[Path]:
    """The checkpoint's files, all present."""
    index = model_dir / "model.safetensors.index.json"
    single = model_dir / "model.safetensors"
    if index.exists():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise WeightsError(f"{index} has no weight_map")
        files = [model_dir / name for name in sorted({str(name) for name in weight_map.values()})]
    else:
        files = [single]
    missing = [path.name for path in files if not path.is_file()]
    if missing:
        raise WeightsError(
            f"{model_dir} lacks {', '.join(missing)}: the checkpoint is incomplete, fetch it again"
        )
    return files


def _open(path: Path) -> Any:
    """Open one shard; its header must account for every byte of the file."""
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            if size < 8 or header_bytes > size - 8:
                raise WeightsError(
                    f"{path} is damaged: its header claims {header_bytes} bytes and the file has {size}"
                )
            header = json.loads(file.read(header_bytes))
        ends = [
            entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"
        ]
        expected = 8 + header_bytes + max(ends, default=0)
        if expected != size:
            raise WeightsError(f"{path} is damaged: {size} bytes long, its header says {expected}")
        return safe_open(path, framework="pt")
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, SafetensorError) as error:
        raise WeightsError(f"{path} is not a safetensors file: {error}") from error


def _check_complete(
    table: dict[str, WeightSource], where: dict[str, Any], config: ModelConfig, model_dir: Path
) -> None:
    wanted = {name for source in table.values() for name in source.tensors}
    missing = sorted(wanted - where.keys())
    extra = sorted(where.keys() - wanted)
    if config.tied_embeddings and "lm_head.weight" in extra:
        raise WeightsError(
            f"{model_dir}: lm_head.weight is stored although tie_word_embeddings is true; which one counts is"
            " ambiguous: drop the tensor or set tie_word_embeddings to false"
        )
    if missing:
        raise WeightsError(f"{model_dir}: {len(missing)} tensors are missing: {_some(missing)}")
    if extra:
        raise WeightsError(
            f"{model_dir}: {len(extra)} tensors belong to nothing in this model: {_some(extra)}"
        )


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more


def _fill(
    ours: str, source: WeightSource, where: dict[str, Any], dtype: torch.dtype, digest: Any
) -> torch.Tensor:
    """One parameter from its tensors; slices are written in place, so peak memory is the parameter and one tensor."""
    parameter = torch.full(source.shape, float("nan"), dtype=dtype)
    per_slice = len(source.tensors) // source.stack if source.stack else len(source.tensors)
    rows = 0
    for index, name in enumerate(source.tensors):
        if index % per_slice == 0:
            rows = 0
        target = parameter[index // per_slice] if source.stack else parameter
        tensor: torch.Tensor = where[name].get_tensor(name)
        part = target[rows : rows + tensor.shape[0]]
        if part.shape != tensor.shape:
            raise WeightsError(
                f"{name} has shape {list(tensor.shape)}, it must fit rows {rows} … of {list(target.shape)}"
                f" ({ours})"
            )
        digest.update(f"{name}:{tensor.dtype}:{list(tensor.shape)};".encode())
        digest.update(tensor.contiguous().view(torch.uint8).numpy().data)
        part.copy_(tensor)
        rows += tensor.shape[0]
        if (index + 1) % per_slice == 0 and rows != target.shape[0]:
            raise WeightsError(
                f"{ours} needs {target.shape[0]} rows and {name} and those before it give {rows}"
            )
    if not bool(torch.isfinite(parameter).all()):
        raise WeightsError(f"{ours} ({_some(list(source.tensors))}) holds values that are not finite")
    return parameter
