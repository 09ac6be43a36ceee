"""Redis behind Sentinel: the master is asked for, believed only after it says so itself, and asked for anew as soon as
anything is wrong with it.

As the guidelines for Sentinel clients have it (redis.io, "Guidelines for Redis clients with support for Redis
Sentinel"): first answering sentinel goes to the front, ROLE is checked, no answer is kept past a broken connection.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from moorage.prefix_cache.errors import StoreError, StoreRefused, StoreTimeout, StoreUnavailable
from moorage.prefix_cache.redis_config import Endpoint, RedisTarget
from moorage.prefix_cache.redis_connection import ErrorReply, Reply
from moorage.prefix_cache.redis_link import Operation, RedisLink, retrying

RECHECK_S = 2.0
"""A master that works is asked about again after so many seconds: one that was deposed while it lived goes on taking
writes, which are lost once it becomes a replica. Sentinel lets it go on for about ten seconds.
"""
RECHECK_WAIT_S = 0.2
"""Longest wait for that answer; without one the master is kept."""
_ROLE = Operation("", ((b"ROLE",),))


class SentinelLink:
    """One link to the present master. While a failover runs every call fails in time, and a later one
    finds the new master.
    """

    def __init__(self, target: RedisTarget) -> None:
        """Connects at first use."""
        self._target = target
        self._service = target.service
        names = ", ".join(map(str, target.endpoints))
        self.address = f"{self._service} (sentinels {names})"
        self._lock = threading.Lock()
        self._sentinels = [RedisLink(one, target.sentinel) for one in target.endpoints]
        self._master: RedisLink | None = None
        self._recheck_at = 0.0
        self._closed = False

    def execute(self, operations: Sequence[Operation], deadline: float) -> list[Reply]:
        """See Link."""
        return retrying(
            self.address, lambda: self._attempt(operations, deadline), deadline, self._target.node
        )

    def close(self) -> None:
        """See Link."""
        with self._lock:
            self._closed = True
            links = [*self._sentinels, *([self._master] if self._master else [])]
            self._master = None
        for link in links:
            link.close()

    # -- inside ------------------------------------------------------------------------------------

    def _attempt(self, operations: Sequence[Operation], deadline: float) -> list[Reply]:
        master = self._current(deadline)
        try:
            return master.checked(master.exchange(operations, deadline))
        except (StoreUnavailable, StoreTimeout):
            self._forget(master)
            raise

    def _current(self, deadline: float) -> RedisLink:
        now = time.monotonic()
        with self._lock:
            master, due = self._master, now >= self._recheck_at
            if due:
                self._recheck_at = now + RECHECK_S  # for one caller at a time
        if master is None:
            return self._adopt(self._discover(deadline), deadline)
        if due:
            try:
                named = self._discover(min(deadline, now + RECHECK_WAIT_S))
            except StoreError:
                return master  # the sentinels are away, it is not
            if named != master.endpoint:
                return self._adopt(named, deadline)
        return master

    def _forget(self, master: RedisLink) -> None:
        with self._lock:
            if self._master is master:
                self._master = None
        master.retire()

    def _adopt(self, endpoint: Endpoint, deadline: float) -> RedisLink:
        """A link to what a sentinel named, if it is a master in its own eyes too."""
        link = RedisLink(endpoint, self._target.node)
        try:
            (reply,) = link.checked(link.exchange([_ROLE], deadline))
            role = _text(reply[0]) if isinstance(reply, list) and reply else "unknown"
            if role != "master":
                raise StoreUnavailable(
                    f"Redis at {link.address} was named as the master of {self._service} and says that"
                    f" it is a {role[:16]}: the failover is not over"
                )
            with self._lock:
                if self._closed:
                    raise StoreUnavailable(f"Redis at {self.address}: the link is closed")
                before, self._master = self._master, link
                self._recheck_at = time.monotonic() + RECHECK_S
        except BaseException:
            link.close()
            raise
        if before is not None:
            before.retire()
        return link

    def _discover(self, deadline: float) -> Endpoint:
        """The master, by the first sentinel that knows one; each gets its share of the time left."""
        question = Operation(
            "", ((b"SENTINEL", b"GET-MASTER-ADDR-BY-NAME", self._service.encode()),)
        )
        reasons: list[str] = []
        with self._lock:
            sentinels = list(self._sentinels)
        for index, sentinel in enumerate(sentinels):
            now = time.monotonic()
            share = now + (deadline - now) / (len(sentinels) - index)
            try:
                (reply,) = sentinel.exchange([question], share)
            except StoreError as error:
                reasons.append(str(error))
                continue
            if isinstance(reply, list) and len(reply) == 2:
                with self._lock:  # others may have put theirs in front meanwhile
                    self._sentinels.remove(sentinel)
                    self._sentinels.insert(0, sentinel)
                return Endpoint(_text(reply[0]), int(_text(reply[1])))
            said = reply.code if isinstance(reply, ErrorReply) else "no master of that name"
            reasons.append(f"{sentinel.address} says: {said}")
        if all("no master of that name" in reason for reason in reasons):
            raise StoreRefused(
                f"no sentinel knows {self._service}: check the service's name in the Redis URL"
                f" ({self.address})"
            )
        raise StoreUnavailable(
            f"no sentinel names the master of {self._service}: {'; '.join(reasons)}"
        )


def _text(reply: Reply) -> str:
    return bytes(reply).decode(errors="replace") if isinstance(reply, bytes | memoryview) else ""
