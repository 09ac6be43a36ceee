"""A deterministic stand-in for the Engine facade: same methods, own thread, same order of outputs.

The "model" is a function from the text of the prompt to the text of the reply; tokens are bytes,
with a few special ones. KV is a number per session, blocks are 16 tokens, tiers are a dictionary
that may outlive the engine (so that a test can restart it). Steps can be held, so that a test
decides what has happened when.
"""

from __future__ import annotations

import codecs
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from moorage.engine import (
    Abort,
    Command,
    EngineClosed,
    EngineFailed,
    EngineFault,
    EngineStatistics,
    FaultCode,
    FinishReason,
    Inspect,
    Inspection,
    MailboxFull,
    ModelInfo,
    Park,
    ParkCommitted,
    ParkDone,
    ParkFailed,
    ParkPrepared,
    ParkRefused,
    Release,
    Request,
    Restore,
    RestoreDone,
    StepOutput,
    Submit,
    TokenOutput,
    TokensBySource,
    unpack_tokens,
)

BLOCK = 16
SPECIALS = {256: "<|im_start|>", 257: "<|im_end|>", 258: "<tool_call>", 259: "</tool_call>"}
IM_START, IM_END, CALL, END_CALL = 256, 257, 258, 259
TO = 260
"""Decodes to "to"; the encoder never writes it: a non-canonical token (case J1)."""
POISON = 261
"""The detokeniser raises when it is fed this (case F9)."""
VOCAB = 262

TEMPLATE = """{%- if messages[0].role == 'system' %}
{%- set system = messages[0].content %}{%- set rest = messages[1:] %}
{%- else %}{%- set system = '' %}{%- set rest = messages %}{%- endif %}
{%- if system or tools %}
{{- '<|im_start|>system\\n' + system }}
{%- if tools %}
{{- ('\\n\\n' if system else '') + '# Tools\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
{{- '\\n</tools>' }}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in rest %}
{%- if message.role == 'tool' %}
{%- if loop.first or rest[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or rest[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- else %}
{{- '<|im_start|>' + message.role + '\\n' + message.content }}
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


@dataclass(frozen=True)
class DecodedText:
    text: str
    stopped: bool


class FakeDecoder:
    def __init__(self, stop: tuple[str, ...]) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._stop, self._held, self._stopped = stop, "", False

    def feed(self, token_id: int) -> DecodedText:
        if token_id == POISON:
            raise ValueError("poisoned token")
        if token_id < 256:
            text = self._utf8.decode(bytes([token_id]))
        else:
            text = {CALL: "<tool_call>", END_CALL: "</tool_call>", TO: "to"}.get(token_id, "")
        return self._release(text)

    def _release(self, text: str) -> DecodedText:
        if self._stopped:
            return DecodedText("", True)
        text = self._held + text
        for stop in self._stop:
            if stop in text:
                self._stopped = True
                return DecodedText(text[: text.index(stop)], True)
        hold = max(
            (n for s in self._stop for n in range(1, len(s)) if text.endswith(s[:n])), default=0
        )
        self._held = text[len(text) - hold :]
        return DecodedText(text[: len(text) - hold], False)

    def finish(self) -> str:
        held, self._held = self._held, ""
        return held + self._utf8.decode(b"", True)


@dataclass
class Tiers:
    """What outlives an engine: manifest -> tokens it covers."""

    parked: dict[bytes, int] = field(default_factory=dict)


@dataclass
class _Running:
    request: Request
    script: list[int]
    done: int
    decoder: FakeDecoder
    sources: TokensBySource | None
    forwarded: int = 0


class FakeEngine:
    def __init__(
        self,
        model: Callable[[str], str | list[int]],
        *,
        tiers: Tiers | None = None,
        context_len: int = 4096,
        max_running: int = 64,
        mailbox_len: int = 1024,
        held: bool = False,
    ) -> None:
        self.model = model
        self.tiers = tiers or Tiers()
        self.model_info = ModelInfo(
            name="fake", context_len=context_len, vocab_size=VOCAB, eos_token_ids=(IM_END,),
            fingerprint="00" * 16, block_size=BLOCK, dtype="float32", chat_template=TEMPLATE,
            special_tokens=tuple(SPECIALS.values()), deterministic=True,
        )  # fmt: skip
        self._max_running = max_running
        self._mailbox: queue.Queue[Command] = queue.Queue(mailbox_len)
        self._gate = threading.Condition()
        self._allowed = 0 if held else None
        self._closed = False
        self._waiting: list[_Running] = []
        self._running: dict[str, _Running] = {}
        self._device: dict[str, int] = {}
        self._parks: dict[tuple[str, int], bytes] = {}
        self.refuse_parks = False
        self.hold_parks = False
        self._held_parks: list[Park] = []
        self.commands: list[Command] = []
        """Everything the thread has applied, in order."""
        self.requests: list[Request] = []
        self.steps = 0
        self.die = False
        self._thread = threading.Thread(target=self._run, daemon=True)

    # -- the facade
    # ----------------------------------------------------------------------------------------

    def encode(self, text: str, *, allow_special: bool) -> list[int]:
        ids: list[int] = []
        while text:
            for token_id, special in SPECIALS.items():
                if allow_special and text.startswith(special):
                    ids.append(token_id)
                    text = text[len(special) :]
                    break
            else:
                ids += text[0].encode()
                text = text[1:]
        return ids

    def decode_stream(
        self, token_ids_before: Sequence[int], stop: tuple[str, ...] = ()
    ) -> FakeDecoder:
        return FakeDecoder(stop)

    def start(self, on_step: Callable[[StepOutput], None]) -> None:
        self._on_step = on_step
        self._thread.start()

    def send(self, command: Command) -> None:
        if self._closed:
            raise EngineClosed("closed")
        try:
            self._mailbox.put_nowait(command)
        except queue.Full:
            raise MailboxFull("full") from None
        with self._gate:
            self._gate.notify_all()

    def statistics(self) -> EngineStatistics:
        return EngineStatistics(steps=self.steps)

    def close(self, deadline_s: float = 10.0) -> None:
        with self._gate:
            self._closed = True
            self._gate.notify_all()
        if self._thread.ident is not None:
            self._thread.join(deadline_s)

    # -- what tests control
    # --------------------------------------------------------------------------------

    def hold(self) -> None:
        """No step from now on; commands wait too."""
        with self._gate:
            self._allowed = 0

    def allow(self, steps: int | None) -> None:
        """Let so many steps run; None for all."""
        with self._gate:
            self._allowed = None if steps is None else (self._allowed or 0) + steps
            self._gate.notify_all()

    def release_parks(self) -> None:
        """Answer the parks that `hold_parks` kept."""
        self.hold_parks = False
        with self._gate:
            self._gate.notify_all()

    # -- the thread
    # ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._gate:
                self._gate.wait_for(self._ready, 5)
                if self._closed:
                    return
                if self._allowed == 0:
                    continue
                if self._allowed is not None:
                    self._allowed -= 1
            if self.die:
                fault = EngineFault(FaultCode.INTERNAL, "the fake died")
                self._closed = True
                self._on_step(StepOutput(self.steps, (), (EngineFailed(fault),)))
                return
            tokens: list[TokenOutput] = []
            events: list[object] = []
            if not self.hold_parks:
                for park in self._held_parks:
                    self._park(park, events)
                self._held_parks.clear()
            while True:
                try:
                    command = self._mailbox.get_nowait()
                except queue.Empty:
                    break
                self.commands.append(command)
                self._apply(command, tokens, events)
            while self._waiting and len(self._running) < self._max_running:
                admitted = self._waiting.pop(0)
                self._running[admitted.request.request_id] = admitted
            for running in list(self._running.values()):
                self._decode(running, tokens)
            if tokens or events:
                self._on_step(StepOutput(self.steps + 1, tuple(tokens), tuple(events)))  # type: ignore[arg-type]
            self.steps += 1

    def _ready(self) -> bool:
        if self._closed or self.die:
            return True
        work = not self._mailbox.empty() or self._running or self._waiting
        work = work or (self._held_parks and not self.hold_parks)
        return bool(work) and self._allowed != 0

    def _apply(self, command: Command, tokens: list[TokenOutput], events: list[object]) -> None:
        match command:
            case Submit(request):
                self._submit(request, tokens)
            case Abort(request_id):
                found = self._running.pop(request_id, None)
                for waiting in self._waiting:
                    if waiting.request.request_id == request_id:
                        found = waiting
                        self._waiting.remove(waiting)
                        break
                if found is not None:
                    position = found.request.num_prompt + found.done
                    tokens.append(
                        TokenOutput(
                            request_id,
                            found.request.session_id,
                            position,
                            None,
                            "",
                            FinishReason.CANCELLED,
                        )
                    )
            case Park():
                if self.hold_parks:
                    self._held_parks.append(command)
                else:
                    self._park(command, events)
            case ParkCommitted(session_id, generation):
                freed = -(-self._device.pop(session_id, 0) // BLOCK)
                events.append(ParkDone(session_id, generation, freed))
            case ParkFailed(session_id, generation):
                self.tiers.parked.pop(self._parks.pop((session_id, generation), b""), None)
            case Restore():
                sources = self._sources(
                    command.session_id, len(unpack_tokens(command.token_ids)), 0, command.manifest
                )
                self._device[command.session_id] = sources.device + sources.host
                events.append(RestoreDone(command.session_id, sources, 100 * sources.host, 0.001))
            case Release(session_id, _, manifest):
                self._device.pop(session_id, None)
                if manifest is not None:
                    self.tiers.parked.pop(manifest, None)
            case Inspect(inspection_id, session_id):
                held = -(-self._device.get(session_id, 0) // BLOCK)
                total = sum(-(-n // BLOCK) for n in self._device.values())
                events.append(
                    Inspection(
                        inspection_id,
                        session_id,
                        held,
                        0,
                        1000 - total,
                        0,
                        total,
                        0,
                        1000,
                        0,
                        1,
                        0,
                        0,
                        0,
                    )
                )

    def _park(self, command: Park, events: list[object]) -> None:
        session_id, generation = command.session_id, command.generation
        if self.refuse_parks:
            fault = EngineFault(FaultCode.STORE, "the tier is full")
            events.append(ParkRefused(session_id, generation, fault))
            return
        tokens = self._device.get(session_id, 0)
        manifest = f"{session_id}/{generation}/{tokens}".encode()
        self._parks[session_id, generation] = manifest
        self.tiers.parked[manifest] = tokens
        tier = "host" if command.tier == "auto" else command.tier
        events.append(
            ParkPrepared(session_id, generation, manifest, tier, tokens, 64 * tokens, 0.002)
        )

    def _sources(
        self, session_id: str, length: int, num_known: int, manifest: bytes | None
    ) -> TokensBySource:
        device = min(self._device.get(session_id, 0), length - 1)
        if device:
            known = max(0, num_known - device)
            return TokensBySource(device=device, recomputed=known, new=length - device - known)
        host = min(self.tiers.parked.get(manifest or b"", 0), length - 1)
        known = max(0, num_known - host)
        reason = "frames lost" if known else ""
        return TokensBySource(
            host=host, recomputed=known, new=length - host - known, recomputed_reason=reason
        )

    def _submit(self, request: Request, tokens: list[TokenOutput]) -> None:
        self.requests.append(request)
        ids = unpack_tokens(request.token_ids)
        if any(r.request.session_id == request.session_id for r in self._running.values()):
            fault = EngineFault(FaultCode.STATE, "generates already")
            tokens.append(
                TokenOutput(
                    request.request_id,
                    request.session_id,
                    len(ids),
                    None,
                    "",
                    FinishReason.ERROR,
                    fault,
                )
            )
            return
        reply = self.model(self.text(ids[: request.num_prompt]))
        script = (
            reply if isinstance(reply, list) else [*self.encode(reply, allow_special=True), IM_END]
        )
        sources = self._sources(request.session_id, len(ids), request.num_known, request.manifest)
        done = len(ids) - request.num_prompt
        decoder = FakeDecoder(request.sampling.stop)
        for token_id in ids[request.num_prompt :]:
            if token_id != POISON:
                decoder.feed(token_id)
        if done >= len(script):
            tokens.append(
                TokenOutput(
                    request.request_id, request.session_id, len(ids), None, "", FinishReason.STOP
                )
            )
            return
        running = _Running(request, script, done, decoder, sources)
        running.forwarded = sources.recomputed + sources.new
        self._waiting.append(running)

    def _decode(self, running: _Running, tokens: list[TokenOutput]) -> None:
        request = running.request
        token_id = running.script[running.done]
        position = request.num_prompt + running.done
        running.done += 1
        decoded = DecodedText("", False) if token_id == POISON else running.decoder.feed(token_id)
        reason = None
        if token_id == IM_END or decoded.stopped:
            reason = FinishReason.STOP
        elif (
            (request.sampling.max_tokens and running.done >= request.sampling.max_tokens)
            or position + 1 >= self.model_info.context_len
            or running.done >= len(running.script)
        ):
            reason = FinishReason.LENGTH
        tokens.append(
            TokenOutput(
                request.request_id, request.session_id, position, token_id, decoded.text, reason,
                sources=running.sources, num_forwarded=running.forwarded,
            )
        )  # fmt: skip
        running.sources = None
        running.forwarded += 1
        self._device[request.session_id] = position
        if reason is not None:
            del self._running[request.request_id]

    def text(self, ids: Sequence[int]) -> str:
        """The ids as text, specials written out."""
        out = b""
        for token_id in ids:
            if token_id < 256:
                out += bytes([token_id])
            else:
                out += SPECIALS.get(token_id, "to" if token_id == TO else "?").encode()
        return out.decode("utf-8", "replace")


def with_context_len(engine: FakeEngine, context_len: int) -> FakeEngine:
    """The same engine with another window."""
    engine.model_info = replace(engine.model_info, context_len=context_len)
    return engine
