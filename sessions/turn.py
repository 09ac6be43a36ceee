"""What the service keeps of a running turn, and how it is rebuilt from the log after a crash."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from moorage.engine import Submit, TokenOutput
from moorage.sessions.proto import sessions_pb2 as pb
from moorage.sessions.token_log import (
    TOKEN_BYTES,
    InputRecord,
    Record,
    TokenRecord,
    TurnStartRecord,
)


@dataclass
class Stretch:
    """The tokens between one input and the next: one request to the engine (two, after a crash)."""

    start: int
    """Log length at which it began: the engine's `num_prompt`."""
    input_position: int
    """Log length before its input: what stands below had its KV computed once (but for the last
    token).
    """
    num_generated: int = 0
    began_s: float = field(default_factory=time.monotonic)
    first_token_s: float = 0.0
    last_token_s: float = 0.0
    first_output: TokenOutput | None = None
    """The output that came with `sources`."""

    def to_proto(self) -> pb.Stretch:
        """Its share of the turn's usage."""
        first = self.first_output
        return pb.Stretch(
            sources=pb.TokenSources(**sources_of(first)) if first is not None else None,
            num_forwarded=first.num_forwarded if first is not None else 0,
            num_generated=self.num_generated,
            ttft_s=max(0.0, self.first_token_s - self.began_s) if self.first_token_s else 0.0,
            decode_s=max(0.0, self.last_token_s - self.first_token_s),
            restore_s=first.restore_s if first is not None else 0.0,
            queue_s=first.queue_s if first is not None else 0.0,
        )


@dataclass
class Turn:
    """One turn: one or more stretches with tool waits between them."""

    number: int
    sampling: dict[str, Any]
    deadline_s: float
    """Seconds of generation over all stretches; 0 is none."""
    idempotency_key: str
    num_input: int = 0
    done: list[Stretch] = field(default_factory=list)
    """Stretches that ended."""
    stretch: Stretch | None = None
    """The one that runs, or ran last."""

    @property
    def num_generated(self) -> int:
        """Tokens of the whole turn."""
        running = self.stretch.num_generated if self.stretch is not None else 0
        return running + sum(stretch.num_generated for stretch in self.done)

    @property
    def tokens_left(self) -> int:
        """Of max_tokens, for the stretch that begins; 0 means the rest of the window; negative:
        none left.
        """
        limit = int(self.sampling.get("max_tokens", 0))
        if limit == 0:
            return 0
        left = limit - sum(stretch.num_generated for stretch in self.done)
        return left if left > 0 else -1

    def seconds_left(self) -> float | None:
        """Of the deadline, for the stretch that begins; None is no deadline."""
        if not self.deadline_s:
            return None
        used = sum(max(0.0, s.last_token_s - s.began_s) for s in self.done)
        return max(0.001, self.deadline_s - used)

    def begin_stretch(self, *, start: int, input_position: int) -> None:
        """Input was appended; the previous stretch, if any, is over."""
        if self.stretch is not None:
            self.done.append(self.stretch)
        self.stretch = Stretch(start=start, input_position=input_position)
        self.num_input += start - input_position

    def usage(self) -> pb.Usage:
        """What the turn cost so far."""
        stretches = [*self.done, *([self.stretch] if self.stretch is not None else [])]
        return pb.Usage(
            num_input=self.num_input,
            num_generated=self.num_generated,
            stretches=[stretch.to_proto() for stretch in stretches],
        )

    @classmethod
    def from_records(cls, records: Iterable[Record]) -> Turn | None:
        """The turn as its records tell it; timings from before a crash are gone. None without a
        turn start.
        """
        turn: Turn | None = None
        for record in records:
            match record:
                case TurnStartRecord():
                    turn = cls(
                        record.turn, record.sampling, record.deadline_s, record.idempotency_key
                    )
                case InputRecord() if turn is not None:
                    num_input = len(record.packed_ids) // TOKEN_BYTES
                    turn.begin_stretch(
                        start=record.position + num_input, input_position=record.position
                    )
                case TokenRecord() if turn is not None and turn.stretch is not None:
                    turn.stretch.num_generated += 1
                case _:
                    pass
        return turn


@dataclass
class ActiveRequest:
    """The request that the engine works on for a session."""

    request_id: str
    command: Submit
    announce: bool
    """Its first token is a resume: record where the KV came from."""
    aborting: bool = False
    suspending: bool = False
    """The abort suspends the turn instead of ending it."""


def sources_of(output: TokenOutput) -> dict[str, Any]:
    """`TokensBySource` as plain values."""
    return asdict(output.sources) if output.sources is not None else {}
