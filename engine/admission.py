"""What may start and when it ends: pure rules over one request, apart from the loop that applies them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moorage.engine.context import Context
from moorage.engine.errors import (
    ContextTooLong,
    EngineError,
    InvalidRequest,
    MailboxFull,
    SessionBusy,
)
from moorage.engine.output import FaultCode, FinishReason
from moorage.engine.request import Request
from moorage.engine.settings import EngineConfig
from moorage.engine.tokenizer import ModelTokenizer, OutputDecoder
from moorage.prefix_cache.block import TOKEN_BYTES, TokenIds, unpack_tokens


def check_request(
    request: Request,
    context: Context | None,
    config: EngineConfig,
    *,
    context_len: int,
    num_blocks: int,
    num_waiting: int,
) -> None:
    """Raises InvalidRequest, ContextTooLong, SessionBusy or MailboxFull, naming value and limit; changes nothing."""
    length = request.num_tokens
    request.sampling.validate()
    if length == 0:
        raise InvalidRequest("the log is empty: a request needs at least one token")
    if not 1 <= request.num_prompt <= length:
        raise InvalidRequest(f"num_prompt is {request.num_prompt}, allowed is 1 … {length}")
    if not 0 <= request.num_known < length:
        raise InvalidRequest(f"num_known is {request.num_known}, allowed is 0 … {length - 1}")
    if length >= context_len and length == request.num_prompt:
        raise ContextTooLong(
            f"the context holds {length} tokens and the limit is {context_len}, one of which must be free for"
            " the answer: shorten the input, or rewind or close the session"
        )
    needed = -(-(length + 1) // config.block_size)
    if needed > num_blocks:
        raise ContextTooLong(
            f"the context needs {needed} blocks of {config.block_size} tokens and the device pool has"
            f" {num_blocks}: raise kv_bytes"
        )
    if context is not None and context.generation is not None:
        raise SessionBusy(
            f"session {request.session_id} generates already (request"
            f" {context.generation.request.request_id}): wait for its end or abort it"
        )
    if num_waiting >= config.max_waiting:
        raise MailboxFull(
            f"{num_waiting} requests wait already, the bound is {config.max_waiting}: retry later"
        )


def fault_code(error: EngineError) -> FaultCode:
    """The code that crosses the border for an error of `check_request`."""
    match error:
        case ContextTooLong():
            return FaultCode.TOO_LONG
        case SessionBusy():
            return FaultCode.STATE
        case MailboxFull():
            return FaultCode.BUSY
    return FaultCode.INVALID


def common_prefix(first: TokenIds, second: TokenIds) -> int:
    """Tokens up to the first difference of two packed lists."""
    length = min(len(first), len(second)) // TOKEN_BYTES
    left, right = (np.frombuffer(ids, dtype="<i4", count=length) for ids in (first, second))
    different = np.flatnonzero(left != right)
    return int(different[0]) if len(different) else length


@dataclass(frozen=True)
class EndRules:
    """When a generation is over."""

    eos: frozenset[int]
    context_len: int

    def finish_reason(
        self, request: Request, token_id: int, stopped: bool, num_generated: int, log_len: int
    ) -> FinishReason | None:
        """Why `token_id` ends the generation, or None. `log_len` counts it; a log never exceeds the window."""
        sampling = request.sampling
        ends = token_id in sampling.stop_token_ids or (
            token_id in self.eos and not sampling.ignore_eos
        )
        if stopped or ends:
            return FinishReason.STOP
        if sampling.max_tokens and num_generated >= sampling.max_tokens:
            return FinishReason.LENGTH
        if log_len >= self.context_len:
            return FinishReason.LENGTH
        return None

    def replay(
        self, request: Request, tokenizer: ModelTokenizer
    ) -> tuple[OutputDecoder, FinishReason | None]:
        """The detokeniser as it stood behind the generated part of the log, and the reason where that part had
        ended already: the crash came between the last token and the turn's end."""
        prompt = request.token_ids[: request.num_prompt * TOKEN_BYTES]
        decoder = tokenizer.decode_stream(unpack_tokens(prompt), request.sampling.stop)
        finished: FinishReason | None = None
        generated = unpack_tokens(request.token_ids[request.num_prompt * TOKEN_BYTES :])
        for index, token_id in enumerate(generated):
            stopped = decoder.feed(token_id).stopped
            finished = self.finish_reason(
                request, token_id, stopped, index + 1, request.num_prompt + index + 1
            )
        return decoder, finished
