"""The real engine behind a blocking interface, for tests that look at single commands and outputs."""

from __future__ import annotations

import itertools
import queue
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from moorage.engine import (
    Abort,
    Engine,
    EngineConfig,
    EngineEvent,
    EngineFault,
    FinishReason,
    Inspect,
    Inspection,
    Namespace,
    Park,
    ParkCommitted,
    ParkDone,
    ParkPrepared,
    ParkRefused,
    Request,
    SamplingParams,
    StepOutput,
    Submit,
    TokensBySource,
    pack_tokens,
)

DEMO_MODEL = Path(__file__).parents[1] / "examples" / "demo_model" / "weights"
TENANT = Namespace("tenant-a", "default")
WAIT_S = 60.0
EIGHT = SamplingParams(max_tokens=8, ignore_eos=True)


@dataclass
class Outcome:
    """Everything one request gave."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None
    error: EngineFault | None = None
    sources: TokensBySource | None = None
    forwarded_to_first: int = 0
    """The runner's count at the first sampled token."""


class EngineHarness:
    """Collects outputs by request and events by arrival."""

    def __init__(self, config: EngineConfig) -> None:
        self.engine = Engine(config)
        self.outcomes: dict[str, Outcome] = {}
        self._events: list[EngineEvent] = []
        self._outputs: queue.Queue[StepOutput] = queue.Queue()
        self._numbers = itertools.count(1)
        self._closed = False
        self.engine.start(self._outputs.put)

    def submit(
        self,
        session_id: str,
        token_ids: Sequence[int],
        *,
        num_prompt: int | None = None,
        num_known: int = 0,
        manifest: bytes | None = None,
        namespace: Namespace = TENANT,
        deadline_s: float | None = None,
        extra_key: bytes = b"",
        priority: int = 0,
        sampling: SamplingParams | None = None,
    ) -> str:
        request_id = f"request-{next(self._numbers)}"
        self.outcomes[request_id] = Outcome()
        self.engine.send(
            Submit(
                Request(
                    request_id=request_id,
                    session_id=session_id,
                    namespace=namespace,
                    token_ids=pack_tokens(token_ids),
                    num_prompt=len(token_ids) if num_prompt is None else num_prompt,
                    num_known=num_known,
                    sampling=sampling or SamplingParams(max_tokens=8, ignore_eos=True),
                    deadline_s=deadline_s,
                    manifest=manifest,
                    extra_key=extra_key,
                    priority=priority,
                )
            )
        )
        return request_id

    def run(self, session_id: str, token_ids: Sequence[int], **more: object) -> Outcome:
        return self.finish(self.submit(session_id, token_ids, **more))  # type: ignore[arg-type]

    def finish(self, request_id: str) -> Outcome:
        while self.outcomes[request_id].finish_reason is None:
            self._take()
        return self.outcomes[request_id]

    def until_tokens(self, request_id: str, count: int) -> Outcome:
        while len(self.outcomes[request_id].token_ids) < count:
            self._take()
        return self.outcomes[request_id]

    def abort(self, request_id: str) -> Outcome:
        self.engine.send(Abort(request_id))
        return self.finish(request_id)

    def event(self, kind: type | tuple[type, ...]) -> EngineEvent:
        while True:
            for index, event in enumerate(self._events):
                if isinstance(event, kind):
                    return self._events.pop(index)
            self._take()

    def prepare_park(
        self, session_id: str, generation: int, tier: str = "auto"
    ) -> ParkPrepared | ParkRefused:
        self.engine.send(Park(session_id, generation, tier))  # type: ignore[arg-type]
        event = self.event((ParkPrepared, ParkRefused))
        assert isinstance(event, ParkPrepared | ParkRefused)
        return event

    def park(self, session_id: str, generation: int = 1, tier: str = "auto") -> ParkPrepared:
        """Prepare and commit; returns what was stored."""
        prepared = self.prepare_park(session_id, generation, tier)
        assert isinstance(prepared, ParkPrepared), prepared
        self.engine.send(ParkCommitted(session_id, generation))
        self.event(ParkDone)
        return prepared

    def inspect(self, session_id: str = "nobody") -> Inspection:
        self.engine.send(Inspect("inspection", session_id))
        event = self.event(Inspection)
        assert isinstance(event, Inspection)
        assert event.integrity_error == ""
        assert (
            event.free_blocks + event.evictable_blocks + event.locked_blocks + event.in_use_blocks
            == (event.total_blocks)
        )
        return event

    def close(self) -> None:
        """Check the books and stop; a second call is a no-op."""
        if self._closed:
            return
        self._closed = True
        inspection = self.inspect()
        assert inspection.free_blocks_not_nan in (0, None)
        self.engine.close(10.0)

    def _take(self) -> None:
        output = self._outputs.get(timeout=WAIT_S)
        self._events.extend(output.events)
        for token in output.tokens:
            outcome = self.outcomes[token.request_id]
            assert outcome.finish_reason is None, "an output after the terminal one"
            if token.token_id is not None:
                outcome.token_ids.append(token.token_id)
            outcome.text += token.text
            if token.sources is not None:
                outcome.sources = token.sources
                outcome.forwarded_to_first = token.num_forwarded
            outcome.finish_reason = token.finish_reason
            outcome.error = token.error


def prompt(length: int, seed: int) -> list[int]:
    return torch.randint(
        10, 2500, (length,), generator=torch.Generator().manual_seed(seed)
    ).tolist()


def first_turn(engine: EngineHarness, length: int, seed: int, session: str = "s") -> list[int]:
    """A prompt and eight generated tokens; returns the log, whose last token has no KV yet."""
    return (
        prompt(length, seed) + engine.run(session, prompt(length, seed), sampling=EIGHT).token_ids
    )
