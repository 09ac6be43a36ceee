"""Redis Cluster: operations go to the nodes that own their keys' slots, and follow MOVED and ASK.

Nodes are asked one after another: what a pipeline moves is megabytes, and one thread moves them no faster on two
connections than on one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from moorage.prefix_cache.errors import StoreError, StoreRefused, StoreTimeout, StoreUnavailable
from moorage.prefix_cache.redis_config import Endpoint, RedisTarget
from moorage.prefix_cache.redis_connection import ErrorReply, Reply
from moorage.prefix_cache.redis_keys import slot_of
from moorage.prefix_cache.redis_link import Operation, RedisLink, refusal, retrying

NUM_SLOTS = 16384
"""Of every Redis Cluster (redis.io, "Redis cluster specification")."""
MAX_REDIRECTS = 5
_SLOTS = Operation("", ((b"CLUSTER", b"SLOTS"),))


class ClusterLink:
    """A link to every node that owns slots, and the table of who owns which."""

    def __init__(self, target: RedisTarget) -> None:
        """Connects at first use."""
        self._target = target
        self.address = "cluster of " + ", ".join(map(str, target.endpoints))
        self._lock = threading.Lock()
        self._links: dict[Endpoint, RedisLink] = {}
        self._owners: list[Endpoint | None] = [None] * NUM_SLOTS
        self._nodes: list[Endpoint] = []
        """Every owner of a slot, used before or not."""
        self._stale = True
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
            links = list(self._links.values())
            self._links.clear()
        for link in links:
            link.close()

    # -- inside ------------------------------------------------------------------------------------

    def _attempt(self, operations: Sequence[Operation], deadline: float) -> list[Reply]:
        if self._stale:
            self._refresh(deadline)
        replies: list[Reply] = [None] * len(operations)
        waiting = self._by_owner(operations)
        for _ in range(MAX_REDIRECTS + 1):
            again: dict[tuple[Endpoint, bool], list[int]] = {}
            moved = False
            for (endpoint, asking), indexes in sorted(waiting.items()):
                link = self._link(endpoint)
                try:
                    found = link.exchange([operations[i] for i in indexes], deadline, asking=asking)
                except (StoreUnavailable, StoreTimeout):
                    self._stale = True
                    raise
                for index, reply in zip(indexes, found, strict=True):
                    if isinstance(reply, ErrorReply) and reply.code in ("MOVED", "ASK"):
                        to, asking_next = _redirection(reply, endpoint), reply.code == "ASK"
                        moved = moved or not asking_next
                        again.setdefault((to, asking_next), []).append(index)
                    elif isinstance(reply, ErrorReply):
                        raise refusal(link.address, reply)
                    else:
                        replies[index] = reply
            if not again:
                return replies
            if moved:
                self._stale = (
                    True  # the next call reads the whole table; this one goes where it was sent
                )
            waiting = again
        raise StoreUnavailable(
            f"Redis at {self.address}: redirected more than {MAX_REDIRECTS} times: is it being resharded?"
        )

    def _by_owner(self, operations: Sequence[Operation]) -> dict[tuple[Endpoint, bool], list[int]]:
        """(node, whether to ask) -> indexes of its operations"""
        found: dict[tuple[Endpoint, bool], list[int]] = {}
        for index, operation in enumerate(operations):
            slot = slot_of(operation.key)  # without a key, that of the empty one: any will do
            owner = self._owners[slot]
            if owner is None:
                self._stale = True
                raise StoreUnavailable(
                    f"Redis at {self.address}: no node serves slot {slot}: see CLUSTER INFO"
                )
            found.setdefault((owner, False), []).append(index)
        return found

    def _link(self, endpoint: Endpoint) -> RedisLink:
        with self._lock:
            if self._closed:
                raise StoreUnavailable(f"Redis at {self.address}: the link is closed")
            if endpoint not in self._links:
                self._links[endpoint] = RedisLink(endpoint, self._target.node)
            return self._links[endpoint]

    def _refresh(self, deadline: float) -> None:
        """Read the table from the first node that answers; each gets its share of the time left."""
        with self._lock:
            known = list(dict.fromkeys([*self._nodes, *self._target.endpoints]))
        reasons: list[str] = []
        for index, endpoint in enumerate(known):
            now = time.monotonic()
            share = now + (deadline - now) / (len(known) - index)
            link = self._link(endpoint)
            try:
                (reply,) = link.exchange([_SLOTS], share)
            except StoreError as error:
                reasons.append(str(error))
                continue
            if isinstance(reply, ErrorReply) and "cluster support disabled" in reply.text:
                raise StoreRefused(
                    f"Redis at {link.address} is no cluster: write redis:// in the URL"
                )
            if isinstance(reply, list) and reply:
                self._take_over(reply, endpoint)
                return
            said = reply.code if isinstance(reply, ErrorReply) else "no slots"
            reasons.append(f"{link.address} says: {said}")
        raise StoreUnavailable(
            f"no node of the {self.address} tells who serves what: {'; '.join(reasons)}"
        )

    def _take_over(self, table: list[Reply], asked: Endpoint) -> None:
        owners: list[Endpoint | None] = [None] * NUM_SLOTS
        for entry in table:
            match entry:
                case [int(first), int(last), [host, int(port), *_], *_] if (
                    0 <= first <= last < NUM_SLOTS
                ):
                    name = bytes(host).decode() if isinstance(host, bytes | memoryview) else ""
                    owner = Endpoint(
                        name or asked.host, port
                    )  # a node that knows no name of its own
                    owners[first : last + 1] = [owner] * (last + 1 - first)
                case _:
                    raise StoreRefused(f"Redis at {asked} sent a table of slots that is none")
        nodes = {owner for owner in owners if owner is not None}
        with self._lock:
            self._owners, self._nodes = owners, sorted(nodes)
            self._stale = False
            gone = [link for end, link in self._links.items() if end not in nodes]
            self._links = {end: link for end, link in self._links.items() if end in nodes}
        for link in gone:
            link.retire()


def _redirection(reply: ErrorReply, asked: Endpoint) -> Endpoint:
    """`MOVED 3999 127.0.0.1:6381`: the node; an empty host is the one that was asked."""
    try:
        _, _, where = reply.text.split(" ")
        host, _, port = where.rpartition(":")
        return Endpoint(host.strip("[]") or asked.host, int(port))
    except ValueError:
        raise StoreRefused(f"Redis at {asked} sent a redirection that names no node") from None
