"""What the engine holds of a session: its token log, its blocks, and the generation that runs on it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from moorage.engine.output import TokensBySource
from moorage.engine.request import Request
from moorage.engine.tokenizer import OutputDecoder
from moorage.prefix_cache.block import Lineage
from moorage.prefix_cache.cache import BlockTable
from moorage.prefix_cache.parked_context import ParkedContext

TOKEN_BYTES = 4


class Phase(Enum):
    """Where a generation stands between submission and its end."""

    WAITING = auto()
    """Not admitted: holds nothing but what its context held before."""
    LOADING = auto()
    """Frames are being read from a tier."""
    RUNNING = auto()
    """In the batch: prefill or decode."""


@dataclass
class Generation:
    """One request on its way; mutable, touched by the engine thread alone."""

    request: Request
    decoder: OutputDecoder
    submitted_s: float
    """time.monotonic() at submission."""
    order: int
    """Submission number: first come, first served within a priority."""
    num_generated: int = 0
    num_forwarded: int = 0
    phase: Phase = Phase.WAITING
    sources: TokensBySource | None = None
    """Set at admission; handed out with the first token."""
    admitted_s: float = 0.0
    load_started_s: float = 0.0
    restore_s: float = 0.0
    first_token_sent: bool = False

    @property
    def expires_s(self) -> float:
        """time.monotonic() at which the request's deadline passes."""
        if self.request.deadline_s is None:
            return float("inf")
        return self.submitted_s + self.request.deadline_s


@dataclass
class Context:
    """One session's state in the engine. `token_ids[: num_computed]` has its KV in `table`."""

    session_id: str
    lineage: Lineage
    token_ids: bytearray = field(default_factory=bytearray)
    table: BlockTable | None = None
    num_computed: int = 0
    manifest: ParkedContext | None = None
    """What the session store last committed (or handed in)."""
    generation: Generation | None = None
    parking: int | None = None
    """Generation number of a park in flight: its blocks must not move or go."""
    loading: int | None = None
    """Job id of the tier read in flight; a completion with another id comes too late and is dropped."""
    restoring: bool = False
    """The read in flight belongs to a `Restore` command, not to a generation."""
    lost_reason: str = ""
    """Why device KV that had existed is gone."""
    last_used: int = 0
    """Step of last use, for the order in which idle contexts give way."""

    @property
    def num_tokens(self) -> int:
        """Length of the log."""
        return len(self.token_ids) // TOKEN_BYTES

    @property
    def num_pending(self) -> int:
        """Tokens of the log that have no KV yet."""
        return self.num_tokens - self.num_computed

    @property
    def idle(self) -> bool:
        """Nothing runs, loads or parks on it: its blocks may give way to others."""
        return self.generation is None and self.parking is None and self.loading is None

    def tokens(self, first: int, end: int) -> bytes:
        """Packed ids of the half-open range [first, end)."""
        return bytes(self.token_ids[first * TOKEN_BYTES : end * TOKEN_BYTES])
