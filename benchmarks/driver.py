"""An engine driven one request at a time, for benchmarks."""

from __future__ import annotations

import itertools
import queue
import time
from collections.abc import Sequence
from dataclasses import dataclass

from moorage.engine import (
    Engine,
    Inspect,
    Inspection,
    Namespace,
    Park,
    ParkCommitted,
    ParkDone,
    ParkPrepared,
    Release,
    Request,
    SamplingParams,
    StepOutput,
    Submit,
    TokenOutput,
    pack_tokens,
)

NAMESPACE = Namespace("benchmark", "default")
WAIT_S = 300.0


@dataclass
class Continued:
    """One measured continuation."""

    ttft_s: float
    """From the command to the first token, as its caller sees it."""
    output: TokenOutput


class Driver:
    """Starts the engine; `SystemExit` with a clear text where a measurement cannot be what it says."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._outputs: queue.Queue[StepOutput] = queue.Queue()
        self._numbers = itertools.count(1)
        engine.start(self._outputs.put)

    def ask(
        self, session: str, log: Sequence[int], known: int, manifest: bytes | None = None
    ) -> Continued:
        """One greedy token behind `log`, of which the first `known` had KV before."""
        request = Request(
            request_id=f"r{next(self._numbers)}",
            session_id=session,
            namespace=NAMESPACE,
            token_ids=pack_tokens(log),
            num_prompt=len(log),
            num_known=known,
            sampling=SamplingParams(max_tokens=1, ignore_eos=True),
            manifest=manifest,
        )
        started = time.perf_counter()
        self.engine.send(Submit(request))
        while True:
            for token in self._outputs.get(timeout=WAIT_S).tokens:
                if token.error is not None:
                    raise SystemExit(f"the engine refused the request: {token.error.message}")
                return Continued(time.perf_counter() - started, token)

    def park(self, session: str, generation: int, tier: str) -> tuple[ParkPrepared, float]:
        """The prepared park, and seconds from the command to the freed blocks."""
        started = time.perf_counter()
        self.engine.send(Park(session, generation, tier))  # type: ignore[arg-type]
        prepared: ParkPrepared | None = None
        while True:
            for event in self._outputs.get(timeout=WAIT_S).events:
                if isinstance(event, ParkPrepared):
                    prepared = event
                    self.engine.send(ParkCommitted(session, generation))
                elif isinstance(event, ParkDone) and prepared is not None:
                    return prepared, time.perf_counter() - started
                else:
                    raise SystemExit(f"park to {tier} failed: {event}")

    def release(self, session: str, manifest: bytes | None) -> None:
        """Close the session."""
        self.engine.send(Release(session, NAMESPACE, manifest))

    def inspect(self) -> Inspection:
        """Block counts after a full integrity check, and everything sent before is applied."""
        self.engine.send(Inspect("inspection", "nobody"))
        while True:
            for event in self._outputs.get(timeout=WAIT_S).events:
                if isinstance(event, Inspection):
                    return event
