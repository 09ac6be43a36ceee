"""From a folder of model files to everything the step loop needs: decoder, pool, tree, tokenizer, stores."""

from __future__ import annotations

from dataclasses import dataclass

import structlog
import torch

from moorage.engine.config import load_model_config
from moorage.engine.errors import ModelError, TierSetupError
from moorage.engine.kv_cache import KVCache
from moorage.engine.model import Decoder
from moorage.engine.model_runner import ModelRunner
from moorage.engine.output import ModelInfo
from moorage.engine.settings import EngineConfig
from moorage.engine.tokenizer import ModelTokenizer
from moorage.engine.weights import load_weights, model_fingerprint
from moorage.kernels.device import default_device, set_num_threads
from moorage.prefix_cache.cache import CacheConfig, GroupConfig, PrefixCache
from moorage.prefix_cache.disk_store import DiskConfig, DiskStore
from moorage.prefix_cache.errors import StoreError
from moorage.prefix_cache.frame import Geometry, run_blocks_for
from moorage.prefix_cache.geometry import HEADER_ROOM_BYTES
from moorage.prefix_cache.guarded_store import GuardedStore
from moorage.prefix_cache.host_store import HostStore
from moorage.prefix_cache.redis_store import RedisConfig, RedisStore
from moorage.prefix_cache.store import BlockStore

REDIS_CHECK_S = 2.0
"""Seconds that start-up waits for Redis to answer."""
_log = structlog.get_logger("moorage.engine")
_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class LoadedModel:
    """A model on its device, with empty caches."""

    info: ModelInfo
    tokenizer: ModelTokenizer
    runner: ModelRunner
    kv_cache: KVCache
    cache: PrefixCache
    geometry: Geometry
    stores: tuple[BlockStore, ...]


def load_model(config: EngineConfig) -> LoadedModel:
    """Load and check everything. Raises EngineError subclasses naming file, tensor or setting."""
    set_num_threads(config.num_threads)
    device = default_device()
    model_dir = config.model_dir
    if not model_dir.is_dir():
        raise ModelError(f"{model_dir} is not a folder: --model must name one with a checkpoint")
    model = load_model_config(model_dir)
    name = model.checkpoint_dtype if config.dtype == "auto" else config.dtype
    dtype = _DTYPES.get(name)
    if dtype is None:
        raise ModelError(f"{model_dir}: dtype {name!r} is not supported; use bfloat16 or float32")
    tokenizer = ModelTokenizer(model_dir)
    if tokenizer.vocab_size > model.vocab_size:
        raise ModelError(
            f"{model_dir}: the tokenizer has {tokenizer.vocab_size} tokens and the model {model.vocab_size}"
        )
    weights = load_weights(model_dir, model, dtype)
    attention = model.attention
    block_bytes = (
        len(model.layers)
        * 2
        * attention.num_kv_heads
        * config.block_size
        * attention.head_dim
        * dtype.itemsize
    )
    run_blocks = run_blocks_for(block_bytes)
    geometry = Geometry(
        num_layers=len(model.layers),
        num_kv_heads=attention.num_kv_heads,
        block_size=config.block_size,
        head_dim=attention.head_dim,
        dtype=str(dtype).removeprefix("torch."),
        run_blocks=run_blocks,
        codec=config.tiers.codec,
    )
    num_blocks = config.num_blocks or max(1, config.kv_bytes // block_bytes)
    kv_cache = KVCache(
        num_blocks=num_blocks,
        num_layers=geometry.num_layers,
        num_kv_heads=geometry.num_kv_heads,
        block_size=geometry.block_size,
        head_dim=geometry.head_dim,
        dtype=dtype,
        device=device,
        fill_freed_with_nan=config.fill_freed_with_nan,
    )
    cache = PrefixCache(
        CacheConfig(config.block_size, (GroupConfig("full", num_blocks),), run_blocks),
        on_free=kv_cache.on_free,
    )
    fingerprint = model_fingerprint(
        model, weights.digest, dtype, f"block {config.block_size}, run {run_blocks}"
    )
    info = ModelInfo(
        name=model_dir.resolve().name,
        context_len=min(filter(None, (config.context_len, model.context_len))),
        vocab_size=model.vocab_size,
        eos_token_ids=tokenizer.eos_token_ids,
        fingerprint=fingerprint.hex(),
        block_size=config.block_size,
        dtype=geometry.dtype,
        chat_template=tokenizer.chat_template,
        special_tokens=tuple(sorted(tokenizer.special_tokens)),
        deterministic=device.type == "cpu" and config.tiers.codec == "raw",
    )
    decoder = Decoder(model, weights)
    decoder.warm_up()
    runner = ModelRunner(decoder, kv_cache, config.block_size)
    stores = _stores(config, run_blocks * block_bytes + HEADER_ROOM_BYTES)
    return LoadedModel(info, tokenizer, runner, kv_cache, cache, geometry, stores)


def _stores(config: EngineConfig, frame_bytes: int) -> tuple[BlockStore, ...]:
    """The tiers below the device, fastest first."""
    tiers = config.tiers
    host = HostStore(tiers.host_bytes)
    host.warm(frame_bytes, tiers.warm_bytes)
    stores: list[BlockStore] = [host]
    if tiers.disk_dir is not None:
        try:
            stores.append(GuardedStore(DiskStore(DiskConfig(tiers.disk_dir, tiers.disk_bytes))))
        except StoreError as error:
            raise TierSetupError(str(error)) from error
    if tiers.redis_url is not None:
        redis = RedisStore(RedisConfig(url=tiers.redis_url, ttl_s=tiers.frame_ttl_s))
        try:
            redis.check(REDIS_CHECK_S)
        except StoreError as error:  # it may come later: parks go to host memory until it does
            _log.warning("Redis does not answer; parks go to host memory", reason=str(error))
        stores.append(GuardedStore(redis))
    return tuple(stores)
