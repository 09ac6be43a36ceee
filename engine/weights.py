"""Checkpoint folder → parameters: memory-mapped safetensors, every tensor read once, complete both
ways or refused.

A checkpoint that is nearly right gives fluent nonsense, so nothing is guessed: each file's length
must be what its header says, each stored tensor must have its place, each place its tensor, each
shape must fit, and each parameter starts as NaN and must end without one.
"""

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
from moorage.engine.families.names import WeightSource, WeightTable

NUMERICS_PROFILE = "fp32-router,fp32-accumulate,rotated-keys-1"
"""Names what the arithmetic promises; part of the fingerprint: KV of other arithmetic is a miss."""

_STORED = (torch.bfloat16, torch.float16, torch.float32)
"""A quantised tensor is no number without its scale: cast as it stands it would be nonsense."""
_LISTED = 8
"""Names in one error message."""


@dataclass(frozen=True)
class Weights:
    """Parameters by our names, and a digest of what they hold."""

    parameters: dict[str, torch.Tensor]
    digest: bytes
    """16 bytes, blake2b over (name, shape, dtype, content) of every parameter in name order: the
    same whatever the sharding or the spelling of the checkpoint. About 1 s for each GB."""
    num_bytes: int


def load_weights(model_dir: Path, config: ModelConfig, dtype: torch.dtype) -> Weights:
    """Read every tensor once into parameters of `dtype`.

    Peak memory is the parameters and one tensor; the file's pages are the kernel's to drop. Raises
    WeightsError that names the file or the tensors for: a missing, cut or overlong shard, a tensor
    that nobody asked for, a parameter that nothing fills, another shape or dtype, and values that
    are not finite.
    """
    with ExitStack() as stack:
        where: dict[str, Any] = {}
        for path in _shards(model_dir):
            handle = stack.enter_context(_open(path))
            for name in handle.keys():  # noqa: SIM118  (not a dict)
                if name in where:
                    raise WeightsError(f"{model_dir}: {name} is in two files, {path.name} is one")
                where[name] = handle
        table = family_named(config.family).weight_table(config, where)
        _check_complete(table, where, model_dir)
        digest = blake2b(digest_size=16, person=b"moorage.weights")
        parameters: dict[str, torch.Tensor] = {}
        for ours, source in sorted(table.parameters.items()):
            parameter = _fill(ours, source, where, dtype)
            digest.update(f"{ours}:{dtype}:{list(parameter.shape)};".encode())
            digest.update(parameter.flatten().view(torch.uint8).numpy().data)
            parameters[ours] = parameter
        _check_copies(table, where, model_dir)
    return Weights(
        parameters,
        digest.digest(),
        sum(tensor.numel() * tensor.element_size() for tensor in parameters.values()),
    )


def model_fingerprint(
    config: ModelConfig, digest: bytes, dtype: torch.dtype, run_key: str
) -> bytes:
    """16 bytes that name everything KV depends on beside its tokens.

    Weights, shape, dtype, numerics and `run_key` (block and run size). Build, instruction set and
    parallel layout are not in it: KV moves between them within the stated tolerance.
    """
    named = json.dumps(
        [config.canonical(), digest.hex(), str(dtype), NUMERICS_PROFILE, run_key], sort_keys=True
    )
    return blake2b(named.encode(), digest_size=16, person=b"moorage.model").digest()


def _shards(model_dir: Path) -> list[Path]:
    """The checkpoint's files, all present."""
    index = model_dir / "model.safetensors.index.json"
    names = ["model.safetensors"]
    if index.exists():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise WeightsError(f"{index} has no weight_map")
        names = sorted({str(name) for name in weight_map.values()})
    outside = [name for name in names if Path(name).name != name]
    if outside:
        raise WeightsError(f"{index} names files outside its folder: {_some(outside)}")
    missing = [name for name in names if not (model_dir / name).is_file()]
    if missing:
        raise WeightsError(
            f"{model_dir} lacks {_some(missing)}: the checkpoint is incomplete, fetch it again"
        )
    return [model_dir / name for name in names]


def _open(path: Path) -> Any:
    """Open one shard; its header must account for every byte of the file (case I20).

    A file of no tensors is legal. Layout (safetensors' format document): 8 bytes little-endian
    header length, JSON header, data.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            header_bytes = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or header_bytes > size - 8:
                raise WeightsError(
                    f"{path} is damaged: it has {size} bytes, its header alone needs"
                    f" {8 + header_bytes}: fetch it again"
                )
            header = json.loads(file.read(header_bytes))
        ends = [
            entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"
        ]
        expected = 8 + header_bytes + max(ends, default=0)
        if expected != size:
            raise WeightsError(
                f"{path} is damaged: it has {size} bytes, its header says {expected}:"
                " fetch it again"
            )
        return safe_open(path, framework="pt")
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        IndexError,
        AttributeError,
        RecursionError,
        SafetensorError,
    ) as error:
        raise WeightsError(f"{path} cannot be read as safetensors: {error}") from error


def _check_complete(table: WeightTable, where: dict[str, Any], model_dir: Path) -> None:
    """Every wanted tensor is stored and every stored tensor is wanted (case I15)."""
    wanted = {name for source in table.parameters.values() for name in source.tensors}
    missing = sorted(wanted - where.keys())
    extra = sorted(where.keys() - wanted - table.copies.keys())
    faults = []
    if missing:
        faults.append(f"{len(missing)} tensors are missing: {_some(missing)}")
    if extra:
        faults.append(f"{len(extra)} tensors belong to nothing in this model: {_some(extra)}")
    if faults:
        raise WeightsError(f"{model_dir}: {'; '.join(faults)}")


def _check_copies(table: WeightTable, where: dict[str, Any], model_dir: Path) -> None:
    """A redundant tensor must equal the one that counts (case I14).

    Some tied checkpoints store their head beside the embedding. Where the two differ nobody can
    tell which one was trained, so it is an error and not a warning.
    """
    for name, original in table.copies.items():
        if name in where and not torch.equal(
            where[name].get_tensor(name), where[original].get_tensor(original)
        ):
            raise WeightsError(
                f"{model_dir}: {name} differs from {original} although tie_word_embeddings is true;"
                " drop the tensor or set tie_word_embeddings to false"
            )


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more


def _fill(
    ours: str, source: WeightSource, where: dict[str, Any], dtype: torch.dtype
) -> torch.Tensor:
    """One parameter, contiguous, from its tensors; slices are written in place."""
    parameter = torch.full(source.shape, float("nan"), dtype=dtype)
    per_slice = len(source.tensors) // (source.stack or 1)
    filled = 0
    for index, name in enumerate(source.tensors):
        target = parameter[index // per_slice] if source.stack else parameter
        if index % per_slice == 0:
            filled = 0
        tensor: torch.Tensor = where[name].get_tensor(name)
        if tensor.dtype not in _STORED:
            raise WeightsError(
                f"{name} is stored as {tensor.dtype}, supported are bfloat16, float16 and float32"
                f" ({ours})"
            )
        end = filled + (tensor.shape[0] if tensor.dim() else 0)
        part = target[filled:end]
        last = (index + 1) % per_slice == 0
        if part.shape != tensor.shape or (last and end != target.shape[0]):
            raise WeightsError(
                f"{name} has shape {list(tensor.shape)}, it must fill rows {filled} to"
                f" {target.shape[0] if last else '…'} of {list(target.shape)} ({ours})"
            )
        part.copy_(tensor)
        if not bool(torch.isfinite(part).all()):
            raise WeightsError(f"{name} holds values that are not finite in {dtype} ({ours})")
        filled = end
    # What no tensor reached is NaN still; the checks above leave no such place, this proves it.
    if bool(torch.isnan(parameter).any()):
        raise WeightsError(f"{ours} is not filled by {_some(list(source.tensors))}")
    return parameter
