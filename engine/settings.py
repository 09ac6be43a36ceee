"""Settings of one engine, all fixed at its construction."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from moorage.engine.errors import InvalidRequest


@dataclass(frozen=True)
class TierConfig:
    """The tiers below the device."""

    host_bytes: int = 2 << 30
    """Bytes of host memory for parked frames; the oldest unreferenced frames go first."""
    warm_bytes: int = 0
    """Of host memory touched at start, so that the first parks do not wait for fresh pages; about 1 s a GiB."""
    disk_dir: Path | None = None
    """Directory of the disk tier, used by one process at a time; None leaves the disk out."""
    disk_bytes: int = 16 << 30
    """Bytes of all files in it."""
    redis_url: str | None = None
    """One server, Sentinel or Cluster, each with TLS: the forms are in prefix_cache/redis_config.py. None leaves Redis
    out."""
    frame_ttl_s: float = 7 * 24 * 3600.0
    """Seconds after which a frame in Redis expires; every park renews it."""
    codec: Literal["raw", "int8"] = "raw"
    """How frames are stored. "int8" takes half the room of 16-bit KV, and what follows a resume is close, not equal."""
    host_copies: bool = True
    """Frames that go to or come from disk or Redis stay in host memory too, as far as there is room beside parked
    frames that live there."""
    demote: bool = True
    """Runs that eviction takes from the device go to host memory, as far as there is room beside parked frames."""
    deadline_s: float = 10.0
    """Seconds that one park or load may take in a tier before it counts as failed (a miss)."""
    num_workers: int = 2
    """Threads that copy, check and send frames."""
    queue_len: int = 256
    """Parks and loads that may wait for a worker; one more is refused."""


@dataclass(frozen=True)
class EngineConfig:
    """One engine: model, memory, batch bounds."""

    model_dir: Path
    """A folder with Hugging Face's file names: config.json, *.safetensors, tokenizer.json."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Of weights, activations and KV; "auto" takes the checkpoint's."""
    kv_bytes: int = 512 << 20
    """Device memory for KV blocks; ignored where num_blocks is set."""
    num_blocks: int = 0
    """Device blocks; 0 derives them from kv_bytes."""
    block_size: int = 16
    """Tokens per block."""
    context_len: int = 0
    """Longest log in tokens; 0 takes the model's own limit, which it may only lower."""
    token_budget: int = 512
    """Rows of one forward pass at most; longer prefills are cut into chunks."""
    max_running: int = 64
    """Sequences in one forward pass at most."""
    max_waiting: int = 4096
    """Requests that may wait for admission; one more is refused with MailboxFull."""
    mailbox_len: int = 8192
    """Commands that may wait for the engine thread; one more is refused with MailboxFull."""
    num_threads: int = 0
    """Threads of CPU math; 0 leaves torch's choice."""
    fill_freed_with_nan: bool = False
    """Overwrite every freed block with NaN, so that a wrong reuse cannot hide (tests, demonstrations)."""
    tiers: TierConfig = field(default_factory=TierConfig)

    def validate(self) -> None:
        """Raises InvalidRequest naming the setting, the value and the limit."""
        bounds = (
            ("block_size", self.block_size, 1, 256),
            ("num_blocks", self.num_blocks, 0, 1 << 31),
            ("token_budget", self.token_budget, 1, 1 << 20),
            ("max_running", self.max_running, 1, 4096),
            ("max_waiting", self.max_waiting, 1, 1 << 20),
            ("mailbox_len", self.mailbox_len, 1, 1 << 20),
            ("kv_bytes", self.kv_bytes, 1 << 12, 1 << 50),
            ("tiers.host_bytes", self.tiers.host_bytes, 0, 1 << 50),
            ("tiers.warm_bytes", self.tiers.warm_bytes, 0, 1 << 50),
            ("tiers.disk_bytes", self.tiers.disk_bytes, 1, 1 << 60),
            ("tiers.num_workers", self.tiers.num_workers, 1, 64),
            ("tiers.queue_len", self.tiers.queue_len, 1, 1 << 20),
        )
        for name, value, low, high in bounds:
            if not low <= value <= high:
                raise InvalidRequest(f"{name} is {value}, allowed is {low} … {high}")
        if self.max_running > self.token_budget:
            raise InvalidRequest(
                f"max_running is {self.max_running}, allowed is at most token_budget"
                f" ({self.token_budget}): every running sequence needs one row a step"
            )
