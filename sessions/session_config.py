"""What a session was created with: fixed for its life, stored as one packed value in its row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeAlias, cast

import msgpack

from moorage.engine import InvalidRequest, ParkTier, SamplingParams
from moorage.sessions.errors import InvalidArgument

CONFIG_VERSION = 1

ParkPolicyName: TypeAlias = Literal["auto", "always", "never"]
DisconnectPolicyName: TypeAlias = Literal["continue", "park", "cancel"]


@dataclass(frozen=True)
class SessionConfig:
    """The client's choices."""

    system: str = ""
    """System prompt; empty leaves it to the template."""
    tools: tuple[dict[str, Any], ...] = ()
    """Canonical tool schemas, `{"type": "function", "function": {…}}`, in the client's order."""
    sampling: dict[str, Any] = field(default_factory=dict)
    """field of `SamplingParams` -> the session's default, for the fields that were set."""
    park_policy: ParkPolicyName = "auto"
    """When KV leaves the device."""
    disconnect_policy: DisconnectPolicyName = "continue"
    """What the loss of the last stream does to a running turn."""
    park_tier: ParkTier = "auto"
    """Where automatic parks go."""

    def to_bytes(self) -> bytes:
        """The stored form."""
        return cast(bytes, msgpack.packb({"version": CONFIG_VERSION, **asdict(self)}))

    @classmethod
    def from_bytes(cls, data: bytes) -> SessionConfig:
        """The inverse; fields that a newer version added are left out."""
        values = msgpack.unpackb(data)
        return cls(
            system=values["system"],
            tools=tuple(values["tools"]),
            sampling=values["sampling"],
            park_policy=values["park_policy"],
            disconnect_policy=values["disconnect_policy"],
            park_tier=values["park_tier"],
        )


def resolve_sampling(
    defaults: Mapping[str, Any], overrides: Mapping[str, Any], drawn_seed: int
) -> dict[str, Any]:
    """A turn's complete sampling: the turn's fields over the session's over the engine's, the seed
    drawn if unset.

    Plain values, as the log keeps them. Raises InvalidArgument naming field, value and limit.
    """
    merged = {"seed": drawn_seed, **defaults, **overrides}
    merged["stop"] = tuple(merged.get("stop", ()))
    merged["stop_token_ids"] = tuple(merged.get("stop_token_ids", ()))
    params = SamplingParams(**merged)
    try:
        params.validate()
    except InvalidRequest as error:
        raise InvalidArgument(str(error), field=str(error).partition(" ")[0]) from error
    return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(params).items()}


def sampling_params(values: Mapping[str, Any], *, max_tokens: int) -> SamplingParams:
    """The engine's form of a logged sampling, with the tokens that the turn has left."""
    return SamplingParams(
        **{
            **values,
            "stop": tuple(values.get("stop", ())),
            "stop_token_ids": tuple(values.get("stop_token_ids", ())),
            "max_tokens": max_tokens,
        }
    )
