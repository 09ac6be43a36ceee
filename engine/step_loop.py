"""The engine thread's own state: applies commands, runs steps, turns results into outputs.

Single-threaded by construction: everything here is called by the engine thread, so nothing is locked.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import structlog

from moorage.engine.admission import EndRules, check_request, common_prefix, fault_code
from moorage.engine.context import Context, Generation, Phase
from moorage.engine.errors import EngineError
from moorage.engine.inspection import inspect
from moorage.engine.loading import load_model
from moorage.engine.output import (
    EngineFault,
    EngineStatistics,
    FaultCode,
    FinishReason,
    StepOutput,
)
from moorage.engine.output_buffer import OutputBuffer
from moorage.engine.parking import Parking
from moorage.engine.plan import SequenceResult, StepPlan
from moorage.engine.request import (
    Abort,
    Command,
    Inspect,
    Park,
    ParkCommitted,
    ParkFailed,
    Release,
    Request,
    Restore,
    Submit,
)
from moorage.engine.restoring import Restoring
from moorage.engine.scheduler import Scheduler
from moorage.engine.settings import EngineConfig
from moorage.engine.tier_io import TierIO
from moorage.prefix_cache.block import (
    TOKEN_BYTES,
    Lineage,
    Namespace,
    num_tokens_in,
    pack_tokens,
)
from moorage.prefix_cache.tiers import Completion, DeleteDone, LoadDone, ParkDone

_log = structlog.get_logger("moorage.engine")


class StepLoop:
    """Contexts, scheduler, cache and runner of one engine, and the rules that join them."""

    def __init__(self, config: EngineConfig, *, complete: Callable[[Completion], None]) -> None:
        model = load_model(config)
        self._config = config
        self.model_info = model.info
        self.tokenizer = model.tokenizer
        self._runner = model.runner
        self._kv = model.kv_cache
        self._cache = model.cache
        self._contexts: dict[str, Context] = {}
        self._by_request: dict[str, Context] = {}
        self._io = TierIO(config, model, complete)
        self._parking = Parking(self._io)
        self._restoring = Restoring(self._io)
        self._scheduler = Scheduler(
            self._cache,
            self._contexts,
            token_budget=config.token_budget,
            max_running=config.max_running,
            admit=self._admit,
        )
        self._rules = EndRules(frozenset(model.info.eos_token_ids), model.info.context_len)
        self.blocked = False
        """The last step could plan nothing: whoever waits needs a completion or a command first."""
        self._step = 0
        self._order = 0
        self._tokens_sampled = 0
        self._out = OutputBuffer()

    # -- what the thread asks ------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether the next step may compute something without a further command or completion."""
        return self._scheduler.num_running > 0 or any(
            context.generation is not None and context.loading is None
            for context in self._scheduler.generations()
        )

    def next_wait_s(self, longest_s: float) -> float:
        """Seconds the thread may sleep: until the next request deadline, `longest_s` at most."""
        now = time.monotonic()
        expires = (
            context.generation.expires_s
            for context in self._scheduler.generations()
            if context.generation is not None
        )
        return max(0.0, min([longest_s, *(moment - now for moment in expires)]))

    def step(self, now: float) -> StepOutput:
        """Expire deadlines, run one forward pass where there is work, and hand out what happened."""
        self._expire(now)
        plan = self._scheduler.schedule(self._step + 1)
        self.blocked = plan is None
        if plan is not None:
            self._step += 1
            self._run(plan)
        return self._out.take(self._step)

    def statistics(self) -> EngineStatistics:
        """A snapshot of every counter."""
        blocks = self._cache.statistics()
        tiers = self._io.counters
        return EngineStatistics(
            steps=self._step,
            tokens_forwarded=self._runner.tokens_forwarded,
            forward_passes=self._runner.forward_passes,
            tokens_sampled=self._tokens_sampled,
            largest_batch=self._runner.largest_batch,
            num_running=self._scheduler.num_running,
            num_waiting=self._scheduler.num_waiting,
            num_held=sum(1 for c in self._contexts.values() if c.idle and c.table is not None),
            num_preempted=self._scheduler.num_preempted,
            free_blocks=blocks.free,
            evictable_blocks=blocks.evictable,
            locked_blocks=blocks.locked,
            in_use_blocks=blocks.in_use,
            total_blocks=blocks.total,
            num_nodes=blocks.num_nodes,
            num_splits=blocks.num_splits,
            bytes_parked=tiers.bytes_parked,
            bytes_restored=tiers.bytes_restored,
            tokens_device=tiers.tokens_device,
            tokens_host=tiers.tokens_host,
            tokens_disk=tiers.tokens_disk,
            tokens_redis=tiers.tokens_redis,
            tokens_recomputed=tiers.tokens_recomputed,
            tokens_new=tiers.tokens_new,
            store_failures=tiers.store_failures,
            runs_demoted=tiers.runs_demoted,
        )

    def close(self, deadline_s: float) -> None:
        """Stop the tier workers; waits at most `deadline_s`."""
        self._io.close(deadline_s)

    # -- commands ------------------------------------------------------------------------------------------

    def apply(self, item: Command | Completion) -> None:
        """One command or completion. What a caller did wrong becomes an output; nothing is raised for it."""
        match item:
            case Submit(request):
                self._submit(request)
            case Abort(request_id):
                self._abort(request_id)
            case Park(session_id, generation, tier):
                context = self._contexts.get(session_id)
                self._out.events(self._parking.begin(context, session_id, generation, tier))
            case ParkCommitted(session_id, generation):
                context = self._contexts.get(session_id)
                self._out.events(self._parking.committed(context, session_id, generation))
                self._forget_if_empty(context)
            case ParkFailed(session_id, generation):
                self._parking.failed(self._contexts.get(session_id), session_id, generation)
            case Restore():
                self._restore(item)
            case Release(session_id, namespace, manifest):
                self._release(session_id, namespace, manifest)
            case Inspect(inspection_id, session_id):
                context = self._contexts.get(session_id)
                self._out.events(
                    [inspect(self._io, self._runner, inspection_id, session_id, context)]
                )
            case ParkDone():
                context = self._contexts.get(item.session_id)
                self._out.events(self._parking.finished(item, context))
            case LoadDone():
                self._out.events(self._restoring.finished(item, self._scheduler))
            case DeleteDone():
                self._io.counters.store_failures += item.error is not None

    def _submit(self, request: Request) -> None:
        try:
            check_request(
                request,
                self._contexts.get(request.session_id),
                self._config,
                context_len=self.model_info.context_len,
                num_blocks=self._cache.statistics().total,
                num_waiting=self._scheduler.num_waiting,
            )
        except EngineError as error:
            fault = EngineFault(fault_code(error), str(error))
            self._out.end(request, request.num_tokens, FinishReason.ERROR, fault=fault)
            return
        context = self._context(request.session_id, request.namespace, request.extra_key)
        self._adopt_log(context, request.token_ids)
        self._restoring.adopt_manifest(context, request.manifest)
        decoder, finished = self._rules.replay(request, self.tokenizer)
        self._order += 1
        generation = Generation(
            request=request,
            decoder=decoder,
            submitted_s=time.monotonic(),
            order=self._order,
            num_generated=request.num_tokens - request.num_prompt,
        )
        if finished is not None:  # the crash came between the last token and the turn's end
            self._out.end(request, request.num_tokens, finished)
            return
        context.generation = generation
        self._by_request[request.request_id] = context
        self._scheduler.add(context)

    def _abort(self, request_id: str) -> None:
        context = self._by_request.get(request_id)
        if context is not None:
            self._end(context, FinishReason.CANCELLED)

    def _restore(self, command: Restore) -> None:
        context = self._context(command.session_id, command.namespace, command.extra_key)
        if not context.idle:
            fault = EngineFault(
                FaultCode.STATE,
                f"session {command.session_id} runs, loads or parks: it cannot be restored now",
            )
            self._out.events([self._restoring.restore_refused(command.session_id, fault)])
            return
        self._adopt_log(context, command.token_ids)
        self._restoring.adopt_manifest(context, command.manifest)
        if event := self._restoring.begin_restore(context, self._scheduler.grow_gently):
            self._out.events([event])

    def _release(self, session_id: str, namespace: Namespace, manifest: bytes | None) -> None:
        context = self._contexts.get(session_id)
        if context is not None:
            if context.generation is not None:
                self._end(context, FinishReason.CANCELLED)
            context.parking = None
            self._drop(context)
            self._contexts.pop(session_id, None)
        self._parking.forget(namespace, manifest, context)

    # -- contexts ------------------------------------------------------------------------------------------

    def _context(self, session_id: str, namespace: Namespace, extra_key: bytes) -> Context:
        lineage = Lineage(namespace, bytes.fromhex(self.model_info.fingerprint), extra_key)
        context = self._contexts.get(session_id)
        if context is None or context.lineage != lineage:
            if context is not None:
                self._drop(context)
            context = Context(session_id, lineage)
            self._contexts[session_id] = context
        return context

    def _adopt_log(self, context: Context, token_ids: bytes) -> None:
        """Take the request's log as the truth; keep device KV as far as the two logs agree."""
        length = num_tokens_in(token_ids)
        keep = min(context.num_computed, length - 1)
        if context.loading is not None and not token_ids.startswith(context.token_ids):
            context.lost_reason = "the log changed while its KV was loaded"
            self._drop(context)
        if context.table is not None:
            keep = common_prefix(context.tokens(0, keep), token_ids[: keep * TOKEN_BYTES])
            if keep == 0:
                context.lost_reason = "the log no longer continues what the device held"
                self._drop(context)
            elif keep < context.num_computed:
                self._truncate(context, keep)
        context.token_ids = bytearray(token_ids)

    def _truncate(self, context: Context, num_tokens: int) -> None:
        assert context.table is not None
        moved = self._cache.truncate(context.table, num_tokens)
        if moved is not None:
            self._kv.copy([moved[0]], [moved[1]])
        context.num_computed = num_tokens

    def _drop(self, context: Context) -> None:
        if context.restoring:
            fault = EngineFault(FaultCode.STATE, "the session's log changed while it was restored")
            self._out.events([self._restoring.restore_refused(context.session_id, fault)])
        context.restoring = False
        self._restoring.abandon(context)
        if context.table is not None:
            self._cache.release(context.table)
            context.table = None
        context.num_computed = 0

    def _forget_if_empty(self, context: Context | None) -> None:
        """A parked session costs the engine nothing: its log and manifest come back with the next request."""
        if context is not None and context.idle and context.table is None:
            self._contexts.pop(context.session_id, None)

    def _admit(self, context: Context, generation: Generation) -> Phase:
        """Find the context's KV: held blocks, tree, tiers; the rest will be computed."""
        if context.loading is not None:
            return Phase.WAITING
        return self._restoring.open(context, generation, self._scheduler.grow_gently)

    # -- results -------------------------------------------------------------------------------------------

    def _run(self, plan: StepPlan) -> None:
        try:
            results = self._runner.execute(plan).sequences
        except (RuntimeError, ValueError, IndexError) as error:
            _log.exception("forward pass failed", step=plan.step, sequences=len(plan.sequences))
            fault = EngineFault(FaultCode.INTERNAL, f"forward pass failed: {error}")
            results = tuple(
                SequenceResult(sequence.request_id, 0, None, fault) for sequence in plan.sequences
            )
        for result in results:
            context = self._by_request[result.request_id]
            self._take(context, result)

    def _take(self, context: Context, result: SequenceResult) -> None:
        """One sequence's share of a step: KV became real, maybe a token was drawn."""
        generation = context.generation
        assert generation is not None and context.table is not None
        context.last_used = self._step
        if result.fault is not None:
            if result.num_forwarded == 0 or result.fault.code is FaultCode.NUMERIC:
                self._discard_kv(context)
            self._end(context, FinishReason.ERROR, result.fault)
            return
        size = self._config.block_size
        blocks_before = context.num_computed // size
        context.num_computed += result.num_forwarded
        generation.num_forwarded += result.num_forwarded
        if context.num_computed // size > blocks_before:
            self._cache.commit(context.table, bytes(context.token_ids), context.num_computed)
        if result.token_id is not None:
            self._emit(context, generation, result.token_id)

    def _discard_kv(self, context: Context) -> None:
        """KV of a faulty step must not be found by anyone: the whole path goes, as far as nobody else holds it."""
        if context.table is not None:
            self._cache.discard(context.table)
            context.table = None
        context.num_computed = 0

    def _emit(self, context: Context, generation: Generation, token_id: int) -> None:
        context.token_ids += pack_tokens([token_id])
        generation.num_generated += 1
        self._tokens_sampled += 1
        request = generation.request
        try:
            decoded = generation.decoder.feed(token_id)
            reason = self._rules.finish_reason(
                request, token_id, decoded.stopped, generation.num_generated, context.num_tokens
            )
            text = decoded.text
            if reason is not None and not decoded.stopped:
                text += generation.decoder.finish()
        except (
            ValueError,
            EngineError,
        ) as error:  # one bad stream must not touch the others (case B8)
            _log.exception("detokeniser failed", session_id=context.session_id)
            fault = EngineFault(FaultCode.INTERNAL, f"detokeniser failed: {error}")
            self._end(context, FinishReason.ERROR, fault)
            return
        self._out.token(context, generation, token_id, text, reason)
        if reason is not None:
            self._detach(context)

    def _expire(self, now: float) -> None:
        for context in list(self._scheduler.generations()):
            if context.generation is not None and context.generation.expires_s <= now:
                self._end(context, FinishReason.DEADLINE)

    def _end(
        self, context: Context, reason: FinishReason, fault: EngineFault | None = None
    ) -> None:
        """End a generation without a token; its KV stays with the context, held-back text goes out."""
        generation = context.generation
        if generation is None:
            return
        text = generation.decoder.finish() if fault is None else ""
        self._out.end(
            generation.request,
            context.num_tokens,
            reason,
            text=text,
            fault=fault,
            num_forwarded=generation.num_forwarded,
        )
        self._detach(context)

    def _detach(self, context: Context) -> None:
        generation = context.generation
        if generation is not None:
            self._by_request.pop(generation.request.request_id, None)
            self._scheduler.remove(context)
            context.generation = None
            if not context.restoring:
                self._restoring.abandon(context)
