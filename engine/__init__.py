"""Runs models for sessions: step loop, layers, parking. `Engine` is the only class that sessions use.

Everything that crosses the border to sessions is named here. Importing this does not import torch; `Engine` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moorage.engine.errors import (
    ContextTooLong,
    EngineClosed,
    EngineError,
    InvalidRequest,
    MailboxFull,
    ModelError,
    SessionBusy,
    UnsupportedModel,
    WeightsError,
    WireError,
)
from moorage.engine.output import (
    EngineEvent,
    EngineFailed,
    EngineFault,
    EngineStatistics,
    FaultCode,
    FinishReason,
    Inspection,
    ModelInfo,
    ParkDone,
    ParkPrepared,
    ParkRefused,
    RestoreDone,
    StepOutput,
    TokenOutput,
    TokensBySource,
)
from moorage.engine.request import (
    Abort,
    Command,
    Inspect,
    Park,
    ParkCommitted,
    ParkFailed,
    ParkTier,
    Release,
    Request,
    Restore,
    RetentionHint,
    SamplingParams,
    Submit,
)
from moorage.engine.settings import EngineConfig, TierConfig
from moorage.prefix_cache.block import Namespace, TokenIds, pack_tokens, unpack_tokens

if TYPE_CHECKING:
    from moorage.engine.engine import Engine

__all__ = [
    "Abort",
    "Command",
    "ContextTooLong",
    "Engine",
    "EngineClosed",
    "EngineConfig",
    "EngineError",
    "EngineEvent",
    "EngineFailed",
    "EngineFault",
    "EngineStatistics",
    "FaultCode",
    "FinishReason",
    "Inspect",
    "Inspection",
    "InvalidRequest",
    "MailboxFull",
    "ModelError",
    "ModelInfo",
    "Namespace",
    "Park",
    "ParkCommitted",
    "ParkDone",
    "ParkFailed",
    "ParkPrepared",
    "ParkRefused",
    "ParkTier",
    "Release",
    "Request",
    "Restore",
    "RestoreDone",
    "RetentionHint",
    "SamplingParams",
    "SessionBusy",
    "StepOutput",
    "Submit",
    "TierConfig",
    "TokenIds",
    "TokenOutput",
    "TokensBySource",
    "UnsupportedModel",
    "WeightsError",
    "WireError",
    "pack_tokens",
    "unpack_tokens",
]


def __getattr__(name: str) -> object:
    if name == "Engine":
        from moorage.engine.engine import Engine

        return Engine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
