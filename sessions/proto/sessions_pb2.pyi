from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SessionState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SESSION_STATE_UNSPECIFIED: _ClassVar[SessionState]
    SESSION_STATE_IDLE: _ClassVar[SessionState]
    SESSION_STATE_RUNNING: _ClassVar[SessionState]
    SESSION_STATE_WAITING_TOOLS: _ClassVar[SessionState]
    SESSION_STATE_CLOSED: _ClassVar[SessionState]

class ParkPolicy(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PARK_POLICY_UNSPECIFIED: _ClassVar[ParkPolicy]
    PARK_POLICY_AUTO: _ClassVar[ParkPolicy]
    PARK_POLICY_ALWAYS: _ClassVar[ParkPolicy]
    PARK_POLICY_NEVER: _ClassVar[ParkPolicy]

class DisconnectPolicy(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DISCONNECT_POLICY_UNSPECIFIED: _ClassVar[DisconnectPolicy]
    DISCONNECT_POLICY_CONTINUE: _ClassVar[DisconnectPolicy]
    DISCONNECT_POLICY_PARK: _ClassVar[DisconnectPolicy]
    DISCONNECT_POLICY_CANCEL: _ClassVar[DisconnectPolicy]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_TOOL_CALLS: _ClassVar[FinishReason]
    FINISH_REASON_CANCELLED: _ClassVar[FinishReason]
    FINISH_REASON_DEADLINE: _ClassVar[FinishReason]
    FINISH_REASON_ERROR: _ClassVar[FinishReason]
SESSION_STATE_UNSPECIFIED: SessionState
SESSION_STATE_IDLE: SessionState
SESSION_STATE_RUNNING: SessionState
SESSION_STATE_WAITING_TOOLS: SessionState
SESSION_STATE_CLOSED: SessionState
PARK_POLICY_UNSPECIFIED: ParkPolicy
PARK_POLICY_AUTO: ParkPolicy
PARK_POLICY_ALWAYS: ParkPolicy
PARK_POLICY_NEVER: ParkPolicy
DISCONNECT_POLICY_UNSPECIFIED: DisconnectPolicy
DISCONNECT_POLICY_CONTINUE: DisconnectPolicy
DISCONNECT_POLICY_PARK: DisconnectPolicy
DISCONNECT_POLICY_CANCEL: DisconnectPolicy
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_TOOL_CALLS: FinishReason
FINISH_REASON_CANCELLED: FinishReason
FINISH_REASON_DEADLINE: FinishReason
FINISH_REASON_ERROR: FinishReason

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "stop", "stop_token_ids", "ignore_eos")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    max_tokens: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., seed: _Optional[int] = ..., max_tokens: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: _Optional[bool] = ...) -> None: ...

class ToolSchema(_message.Message):
    __slots__ = ("name", "description", "parameters_json")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_JSON_FIELD_NUMBER: _ClassVar[int]
    name: str
    description: str
    parameters_json: str
    def __init__(self, name: _Optional[str] = ..., description: _Optional[str] = ..., parameters_json: _Optional[str] = ...) -> None: ...

class MessageToolCall(_message.Message):
    __slots__ = ("name", "arguments_json")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_JSON_FIELD_NUMBER: _ClassVar[int]
    name: str
    arguments_json: str
    def __init__(self, name: _Optional[str] = ..., arguments_json: _Optional[str] = ...) -> None: ...

class Message(_message.Message):
    __slots__ = ("role", "content", "tool_calls")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    tool_calls: _containers.RepeatedCompositeFieldContainer[MessageToolCall]
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ..., tool_calls: _Optional[_Iterable[_Union[MessageToolCall, _Mapping]]] = ...) -> None: ...

class TokenInput(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class CreateRequest(_message.Message):
    __slots__ = ("system", "tools", "sampling", "park_policy", "disconnect_policy", "idempotency_key", "park_tier")
    SYSTEM_FIELD_NUMBER: _ClassVar[int]
    TOOLS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    PARK_POLICY_FIELD_NUMBER: _ClassVar[int]
    DISCONNECT_POLICY_FIELD_NUMBER: _ClassVar[int]
    IDEMPOTENCY_KEY_FIELD_NUMBER: _ClassVar[int]
    PARK_TIER_FIELD_NUMBER: _ClassVar[int]
    system: str
    tools: _containers.RepeatedCompositeFieldContainer[ToolSchema]
    sampling: SamplingParams
    park_policy: ParkPolicy
    disconnect_policy: DisconnectPolicy
    idempotency_key: str
    park_tier: str
    def __init__(self, system: _Optional[str] = ..., tools: _Optional[_Iterable[_Union[ToolSchema, _Mapping]]] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., park_policy: _Optional[_Union[ParkPolicy, str]] = ..., disconnect_policy: _Optional[_Union[DisconnectPolicy, str]] = ..., idempotency_key: _Optional[str] = ..., park_tier: _Optional[str] = ...) -> None: ...

class CreateResponse(_message.Message):
    __slots__ = ("session_id", "existed", "context_len", "model")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    EXISTED_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LEN_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    existed: bool
    context_len: int
    model: str
    def __init__(self, session_id: _Optional[str] = ..., existed: _Optional[bool] = ..., context_len: _Optional[int] = ..., model: _Optional[str] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("session_id", "messages", "tokens", "sampling", "deadline_s", "idempotency_key", "cancel_pending_calls", "continue_final_message")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    IDEMPOTENCY_KEY_FIELD_NUMBER: _ClassVar[int]
    CANCEL_PENDING_CALLS_FIELD_NUMBER: _ClassVar[int]
    CONTINUE_FINAL_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    messages: _containers.RepeatedCompositeFieldContainer[Message]
    tokens: TokenInput
    sampling: SamplingParams
    deadline_s: float
    idempotency_key: str
    cancel_pending_calls: bool
    continue_final_message: bool
    def __init__(self, session_id: _Optional[str] = ..., messages: _Optional[_Iterable[_Union[Message, _Mapping]]] = ..., tokens: _Optional[_Union[TokenInput, _Mapping]] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., deadline_s: _Optional[float] = ..., idempotency_key: _Optional[str] = ..., cancel_pending_calls: _Optional[bool] = ..., continue_final_message: _Optional[bool] = ...) -> None: ...

class AttachRequest(_message.Message):
    __slots__ = ("session_id", "after_seq", "until_turn_end")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    AFTER_SEQ_FIELD_NUMBER: _ClassVar[int]
    UNTIL_TURN_END_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    after_seq: int
    until_turn_end: bool
    def __init__(self, session_id: _Optional[str] = ..., after_seq: _Optional[int] = ..., until_turn_end: _Optional[bool] = ...) -> None: ...

class ToolResult(_message.Message):
    __slots__ = ("call_id", "content", "is_error")
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    IS_ERROR_FIELD_NUMBER: _ClassVar[int]
    call_id: str
    content: str
    is_error: bool
    def __init__(self, call_id: _Optional[str] = ..., content: _Optional[str] = ..., is_error: _Optional[bool] = ...) -> None: ...

class SubmitToolResultsRequest(_message.Message):
    __slots__ = ("session_id", "results")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    results: _containers.RepeatedCompositeFieldContainer[ToolResult]
    def __init__(self, session_id: _Optional[str] = ..., results: _Optional[_Iterable[_Union[ToolResult, _Mapping]]] = ...) -> None: ...

class SubmitToolResultsResponse(_message.Message):
    __slots__ = ("num_accepted", "num_duplicates", "pending_call_ids")
    NUM_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    NUM_DUPLICATES_FIELD_NUMBER: _ClassVar[int]
    PENDING_CALL_IDS_FIELD_NUMBER: _ClassVar[int]
    num_accepted: int
    num_duplicates: int
    pending_call_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, num_accepted: _Optional[int] = ..., num_duplicates: _Optional[int] = ..., pending_call_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class ParkRequest(_message.Message):
    __slots__ = ("session_id", "tier")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    tier: str
    def __init__(self, session_id: _Optional[str] = ..., tier: _Optional[str] = ...) -> None: ...

class ParkResponse(_message.Message):
    __slots__ = ("tier", "num_tokens", "num_bytes", "duration_s", "num_freed_blocks")
    TIER_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    DURATION_S_FIELD_NUMBER: _ClassVar[int]
    NUM_FREED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    tier: str
    num_tokens: int
    num_bytes: int
    duration_s: float
    num_freed_blocks: int
    def __init__(self, tier: _Optional[str] = ..., num_tokens: _Optional[int] = ..., num_bytes: _Optional[int] = ..., duration_s: _Optional[float] = ..., num_freed_blocks: _Optional[int] = ...) -> None: ...

class ResumeRequest(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    def __init__(self, session_id: _Optional[str] = ...) -> None: ...

class ResumeResponse(_message.Message):
    __slots__ = ("sources", "num_bytes", "duration_s")
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    DURATION_S_FIELD_NUMBER: _ClassVar[int]
    sources: TokenSources
    num_bytes: int
    duration_s: float
    def __init__(self, sources: _Optional[_Union[TokenSources, _Mapping]] = ..., num_bytes: _Optional[int] = ..., duration_s: _Optional[float] = ...) -> None: ...

class CancelRequest(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    def __init__(self, session_id: _Optional[str] = ...) -> None: ...

class CancelResponse(_message.Message):
    __slots__ = ("was_running", "cancelled_call_ids", "last_seq")
    WAS_RUNNING_FIELD_NUMBER: _ClassVar[int]
    CANCELLED_CALL_IDS_FIELD_NUMBER: _ClassVar[int]
    LAST_SEQ_FIELD_NUMBER: _ClassVar[int]
    was_running: bool
    cancelled_call_ids: _containers.RepeatedScalarFieldContainer[str]
    last_seq: int
    def __init__(self, was_running: _Optional[bool] = ..., cancelled_call_ids: _Optional[_Iterable[str]] = ..., last_seq: _Optional[int] = ...) -> None: ...

class CloseRequest(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    def __init__(self, session_id: _Optional[str] = ...) -> None: ...

class CloseResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetRequest(_message.Message):
    __slots__ = ("session_id", "inspect")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    INSPECT_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    inspect: bool
    def __init__(self, session_id: _Optional[str] = ..., inspect: _Optional[bool] = ...) -> None: ...

class GetResponse(_message.Message):
    __slots__ = ("session_id", "state", "parked", "turn", "last_seq", "num_tokens", "context_len", "pending_calls", "token_ids", "inspection", "engine")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    PARKED_FIELD_NUMBER: _ClassVar[int]
    TURN_FIELD_NUMBER: _ClassVar[int]
    LAST_SEQ_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LEN_FIELD_NUMBER: _ClassVar[int]
    PENDING_CALLS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    INSPECTION_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    state: SessionState
    parked: bool
    turn: int
    last_seq: int
    num_tokens: int
    context_len: int
    pending_calls: _containers.RepeatedCompositeFieldContainer[ToolCallReady]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    inspection: EngineInspection
    engine: EngineStatistics
    def __init__(self, session_id: _Optional[str] = ..., state: _Optional[_Union[SessionState, str]] = ..., parked: _Optional[bool] = ..., turn: _Optional[int] = ..., last_seq: _Optional[int] = ..., num_tokens: _Optional[int] = ..., context_len: _Optional[int] = ..., pending_calls: _Optional[_Iterable[_Union[ToolCallReady, _Mapping]]] = ..., token_ids: _Optional[_Iterable[int]] = ..., inspection: _Optional[_Union[EngineInspection, _Mapping]] = ..., engine: _Optional[_Union[EngineStatistics, _Mapping]] = ...) -> None: ...

class EngineInspection(_message.Message):
    __slots__ = ("session_locked_blocks", "session_in_use_blocks", "free_blocks", "evictable_blocks", "locked_blocks", "in_use_blocks", "total_blocks", "free_blocks_not_nan", "num_nodes", "num_splits", "tokens_forwarded", "forward_passes", "integrity_error")
    SESSION_LOCKED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SESSION_IN_USE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    EVICTABLE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LOCKED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    IN_USE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_NOT_NAN_FIELD_NUMBER: _ClassVar[int]
    NUM_NODES_FIELD_NUMBER: _ClassVar[int]
    NUM_SPLITS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FORWARDED_FIELD_NUMBER: _ClassVar[int]
    FORWARD_PASSES_FIELD_NUMBER: _ClassVar[int]
    INTEGRITY_ERROR_FIELD_NUMBER: _ClassVar[int]
    session_locked_blocks: int
    session_in_use_blocks: int
    free_blocks: int
    evictable_blocks: int
    locked_blocks: int
    in_use_blocks: int
    total_blocks: int
    free_blocks_not_nan: int
    num_nodes: int
    num_splits: int
    tokens_forwarded: int
    forward_passes: int
    integrity_error: str
    def __init__(self, session_locked_blocks: _Optional[int] = ..., session_in_use_blocks: _Optional[int] = ..., free_blocks: _Optional[int] = ..., evictable_blocks: _Optional[int] = ..., locked_blocks: _Optional[int] = ..., in_use_blocks: _Optional[int] = ..., total_blocks: _Optional[int] = ..., free_blocks_not_nan: _Optional[int] = ..., num_nodes: _Optional[int] = ..., num_splits: _Optional[int] = ..., tokens_forwarded: _Optional[int] = ..., forward_passes: _Optional[int] = ..., integrity_error: _Optional[str] = ...) -> None: ...

class EngineStatistics(_message.Message):
    __slots__ = ("tokens_forwarded", "forward_passes", "tokens_sampled", "largest_batch", "num_running", "num_waiting", "bytes_parked", "bytes_restored", "tokens_recomputed", "store_failures")
    TOKENS_FORWARDED_FIELD_NUMBER: _ClassVar[int]
    FORWARD_PASSES_FIELD_NUMBER: _ClassVar[int]
    TOKENS_SAMPLED_FIELD_NUMBER: _ClassVar[int]
    LARGEST_BATCH_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    BYTES_PARKED_FIELD_NUMBER: _ClassVar[int]
    BYTES_RESTORED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_RECOMPUTED_FIELD_NUMBER: _ClassVar[int]
    STORE_FAILURES_FIELD_NUMBER: _ClassVar[int]
    tokens_forwarded: int
    forward_passes: int
    tokens_sampled: int
    largest_batch: int
    num_running: int
    num_waiting: int
    bytes_parked: int
    bytes_restored: int
    tokens_recomputed: int
    store_failures: int
    def __init__(self, tokens_forwarded: _Optional[int] = ..., forward_passes: _Optional[int] = ..., tokens_sampled: _Optional[int] = ..., largest_batch: _Optional[int] = ..., num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., bytes_parked: _Optional[int] = ..., bytes_restored: _Optional[int] = ..., tokens_recomputed: _Optional[int] = ..., store_failures: _Optional[int] = ...) -> None: ...

class Event(_message.Message):
    __slots__ = ("session_id", "turn", "first_seq", "last_seq", "token_ids", "delta", "tool_call_ready", "tool_result_accepted", "parked", "resumed", "turn_end", "failed", "input_accepted", "turn_start")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    TURN_FIELD_NUMBER: _ClassVar[int]
    FIRST_SEQ_FIELD_NUMBER: _ClassVar[int]
    LAST_SEQ_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALL_READY_FIELD_NUMBER: _ClassVar[int]
    TOOL_RESULT_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    PARKED_FIELD_NUMBER: _ClassVar[int]
    RESUMED_FIELD_NUMBER: _ClassVar[int]
    TURN_END_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    INPUT_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    TURN_START_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    turn: int
    first_seq: int
    last_seq: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    delta: Delta
    tool_call_ready: ToolCallReady
    tool_result_accepted: ToolResultAccepted
    parked: Parked
    resumed: Resumed
    turn_end: TurnEnd
    failed: Failed
    input_accepted: InputAccepted
    turn_start: TurnStart
    def __init__(self, session_id: _Optional[str] = ..., turn: _Optional[int] = ..., first_seq: _Optional[int] = ..., last_seq: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., delta: _Optional[_Union[Delta, _Mapping]] = ..., tool_call_ready: _Optional[_Union[ToolCallReady, _Mapping]] = ..., tool_result_accepted: _Optional[_Union[ToolResultAccepted, _Mapping]] = ..., parked: _Optional[_Union[Parked, _Mapping]] = ..., resumed: _Optional[_Union[Resumed, _Mapping]] = ..., turn_end: _Optional[_Union[TurnEnd, _Mapping]] = ..., failed: _Optional[_Union[Failed, _Mapping]] = ..., input_accepted: _Optional[_Union[InputAccepted, _Mapping]] = ..., turn_start: _Optional[_Union[TurnStart, _Mapping]] = ...) -> None: ...

class Delta(_message.Message):
    __slots__ = ("text", "reasoning", "tool_calls")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    REASONING_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    text: str
    reasoning: str
    tool_calls: _containers.RepeatedCompositeFieldContainer[ToolCallDelta]
    def __init__(self, text: _Optional[str] = ..., reasoning: _Optional[str] = ..., tool_calls: _Optional[_Iterable[_Union[ToolCallDelta, _Mapping]]] = ...) -> None: ...

class ToolCallDelta(_message.Message):
    __slots__ = ("call_id", "index", "name", "arguments_delta", "failed")
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_DELTA_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    call_id: str
    index: int
    name: str
    arguments_delta: str
    failed: bool
    def __init__(self, call_id: _Optional[str] = ..., index: _Optional[int] = ..., name: _Optional[str] = ..., arguments_delta: _Optional[str] = ..., failed: _Optional[bool] = ...) -> None: ...

class ToolCallReady(_message.Message):
    __slots__ = ("call_id", "index", "name", "arguments_json", "num_calls", "tail")
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_JSON_FIELD_NUMBER: _ClassVar[int]
    NUM_CALLS_FIELD_NUMBER: _ClassVar[int]
    TAIL_FIELD_NUMBER: _ClassVar[int]
    call_id: str
    index: int
    name: str
    arguments_json: str
    num_calls: int
    tail: Delta
    def __init__(self, call_id: _Optional[str] = ..., index: _Optional[int] = ..., name: _Optional[str] = ..., arguments_json: _Optional[str] = ..., num_calls: _Optional[int] = ..., tail: _Optional[_Union[Delta, _Mapping]] = ...) -> None: ...

class ToolResultAccepted(_message.Message):
    __slots__ = ("call_id", "is_error", "cancelled")
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    IS_ERROR_FIELD_NUMBER: _ClassVar[int]
    CANCELLED_FIELD_NUMBER: _ClassVar[int]
    call_id: str
    is_error: bool
    cancelled: bool
    def __init__(self, call_id: _Optional[str] = ..., is_error: _Optional[bool] = ..., cancelled: _Optional[bool] = ...) -> None: ...

class Parked(_message.Message):
    __slots__ = ("tier", "num_tokens", "num_bytes", "duration_s", "degraded")
    TIER_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    DURATION_S_FIELD_NUMBER: _ClassVar[int]
    DEGRADED_FIELD_NUMBER: _ClassVar[int]
    tier: str
    num_tokens: int
    num_bytes: int
    duration_s: float
    degraded: str
    def __init__(self, tier: _Optional[str] = ..., num_tokens: _Optional[int] = ..., num_bytes: _Optional[int] = ..., duration_s: _Optional[float] = ..., degraded: _Optional[str] = ...) -> None: ...

class Resumed(_message.Message):
    __slots__ = ("sources", "num_forwarded", "restore_s", "queue_s", "ttft_s")
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    NUM_FORWARDED_FIELD_NUMBER: _ClassVar[int]
    RESTORE_S_FIELD_NUMBER: _ClassVar[int]
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    TTFT_S_FIELD_NUMBER: _ClassVar[int]
    sources: TokenSources
    num_forwarded: int
    restore_s: float
    queue_s: float
    ttft_s: float
    def __init__(self, sources: _Optional[_Union[TokenSources, _Mapping]] = ..., num_forwarded: _Optional[int] = ..., restore_s: _Optional[float] = ..., queue_s: _Optional[float] = ..., ttft_s: _Optional[float] = ...) -> None: ...

class TokenSources(_message.Message):
    __slots__ = ("device", "host", "disk", "redis", "recomputed", "new", "recomputed_reason")
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    DISK_FIELD_NUMBER: _ClassVar[int]
    REDIS_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTED_FIELD_NUMBER: _ClassVar[int]
    NEW_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTED_REASON_FIELD_NUMBER: _ClassVar[int]
    device: int
    host: int
    disk: int
    redis: int
    recomputed: int
    new: int
    recomputed_reason: str
    def __init__(self, device: _Optional[int] = ..., host: _Optional[int] = ..., disk: _Optional[int] = ..., redis: _Optional[int] = ..., recomputed: _Optional[int] = ..., new: _Optional[int] = ..., recomputed_reason: _Optional[str] = ...) -> None: ...

class InputAccepted(_message.Message):
    __slots__ = ("source", "num_tokens")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    source: str
    num_tokens: int
    def __init__(self, source: _Optional[str] = ..., num_tokens: _Optional[int] = ...) -> None: ...

class TurnStart(_message.Message):
    __slots__ = ("sampling", "num_prompt")
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_FIELD_NUMBER: _ClassVar[int]
    sampling: SamplingParams
    num_prompt: int
    def __init__(self, sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., num_prompt: _Optional[int] = ...) -> None: ...

class TurnEnd(_message.Message):
    __slots__ = ("finish_reason", "usage", "tail")
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    TAIL_FIELD_NUMBER: _ClassVar[int]
    finish_reason: FinishReason
    usage: Usage
    tail: Delta
    def __init__(self, finish_reason: _Optional[_Union[FinishReason, str]] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., tail: _Optional[_Union[Delta, _Mapping]] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("num_input", "num_generated", "stretches")
    NUM_INPUT_FIELD_NUMBER: _ClassVar[int]
    NUM_GENERATED_FIELD_NUMBER: _ClassVar[int]
    STRETCHES_FIELD_NUMBER: _ClassVar[int]
    num_input: int
    num_generated: int
    stretches: _containers.RepeatedCompositeFieldContainer[Stretch]
    def __init__(self, num_input: _Optional[int] = ..., num_generated: _Optional[int] = ..., stretches: _Optional[_Iterable[_Union[Stretch, _Mapping]]] = ...) -> None: ...

class Stretch(_message.Message):
    __slots__ = ("sources", "num_forwarded", "num_generated", "ttft_s", "decode_s", "restore_s", "queue_s")
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    NUM_FORWARDED_FIELD_NUMBER: _ClassVar[int]
    NUM_GENERATED_FIELD_NUMBER: _ClassVar[int]
    TTFT_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_S_FIELD_NUMBER: _ClassVar[int]
    RESTORE_S_FIELD_NUMBER: _ClassVar[int]
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    sources: TokenSources
    num_forwarded: int
    num_generated: int
    ttft_s: float
    decode_s: float
    restore_s: float
    queue_s: float
    def __init__(self, sources: _Optional[_Union[TokenSources, _Mapping]] = ..., num_forwarded: _Optional[int] = ..., num_generated: _Optional[int] = ..., ttft_s: _Optional[float] = ..., decode_s: _Optional[float] = ..., restore_s: _Optional[float] = ..., queue_s: _Optional[float] = ...) -> None: ...

class Failed(_message.Message):
    __slots__ = ("error", "usage", "tail")
    ERROR_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    TAIL_FIELD_NUMBER: _ClassVar[int]
    error: ErrorDetail
    usage: Usage
    tail: Delta
    def __init__(self, error: _Optional[_Union[ErrorDetail, _Mapping]] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., tail: _Optional[_Union[Delta, _Mapping]] = ...) -> None: ...

class ErrorDetail(_message.Message):
    __slots__ = ("code", "message", "field", "retry_after_s")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    code: str
    message: str
    field: str
    retry_after_s: float
    def __init__(self, code: _Optional[str] = ..., message: _Optional[str] = ..., field: _Optional[str] = ..., retry_after_s: _Optional[float] = ...) -> None: ...
