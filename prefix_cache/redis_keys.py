"""Names of keys in Redis: what shares a slot of a cluster, and what no session id can reach.

    shared     moorage:{r:<last hash>}:<dtype>:<codec>
               a hash; one field per layer range and head range, `L0-6:H0-2`
    private    moorage:{s:<namespace digest>:<session>}:frame:<generation>:<index>
               moorage:{s:<namespace digest>:<session>}:<row │ log │ manifest │ lease>

The part in braces alone decides the slot: everything private to a session shares one, so that it
can stand in one transaction; shared frames lie by their own hash and stand only in single-key
commands.
"""

from __future__ import annotations

from redis.crc import key_slot

from moorage.prefix_cache.block import Namespace
from moorage.prefix_cache.errors import InvalidInput
from moorage.prefix_cache.frame import FrameKey
from moorage.prefix_cache.store import validate_session_id


def session_key(namespace: Namespace, session_id: str, *parts: str) -> str:
    """A key private to a session. Raises InvalidSessionId."""
    tag = f"s:{namespace.digest}:{validate_session_id(session_id)}"
    return ":".join(("moorage", f"{{{tag}}}", *parts))


def frame_redis_key(key: FrameKey, session_id: str, namespace: Namespace) -> str:
    """Where a frame lies. Raises InvalidSessionId, or InvalidInput for another session's private
    frame.
    """
    if key.shared:
        return f"moorage:{{r:{key.name.hex()}}}:{key.dtype}:{key.codec}"
    owner, generation, index = key.parts
    if owner != session_id:
        raise InvalidInput("this private frame belongs to another session")
    return session_key(namespace, session_id, "frame", generation, index)


def slot_of(key: str) -> int:
    """The cluster slot, 0 … 16383, as `CLUSTER KEYSLOT` gives it."""
    return key_slot(key.encode())
