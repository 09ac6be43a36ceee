"""Which backend computes an op: by device type, overridable per op for debugging, counted.

The counters are the proof of what ran: a test that claims to cover a backend asserts on them. A
call costs well under a microsecond on top of the op. Overrides and counters belong to the process;
they are meant for tests and debugging, and are not guarded against other threads (a count may then
be short by one, never an op's backend wrong).
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from moorage.kernels.errors import UnknownBackend

ENVIRONMENT = "MOORAGE_OP_BACKEND"
"""`op=backend,…` or `*=backend`: read once, at import."""
DEFAULT_BACKEND = {"cpu": "cpu"}
"""Device type → backend."""

Implementation = Callable[..., Any]
_registry: dict[str, dict[str, Implementation]] = {}
_overrides: dict[str, str] = {}
counts: Counter[tuple[str, str]] = Counter()
"""(op, backend) → calls since `counts.clear()`."""


def register(op: str, backend: str, implementation: Implementation) -> None:
    """Make a backend known for an op."""
    _registry.setdefault(op, {})[backend] = implementation


def call(op: str, device_type: str, *args: Any) -> Any:
    """Run an op on the backend for this device type (or the overriding one).

    Raises UnknownBackend where there is none.
    """
    backend = DEFAULT_BACKEND.get(device_type)
    if _overrides:
        backend = _overrides.get(op) or _overrides.get("*") or backend
    implementation = _registry[op].get(backend) if backend else None
    if implementation is None or backend is None:
        raise UnknownBackend(
            f"{op} has no backend {backend!r} for device type {device_type!r}; there are"
            f" {sorted(_registry[op])}: move the tensors to one of {sorted(DEFAULT_BACKEND)}, or"
            f" choose a backend with {ENVIRONMENT}"
        )
    counts[op, backend] += 1
    return implementation(*args)


def operators() -> dict[str, list[str]]:
    """Op → its backends."""
    return {op: sorted(backends) for op, backends in sorted(_registry.items())}


def override(op: str, backend: str | None) -> None:
    """Force one op (or `*`, all) to a backend; None ends it. Raises UnknownBackend."""
    if op != "*" and op not in _registry:
        raise UnknownBackend(f"there is no op {op!r}; ops: {', '.join(sorted(_registry))}")
    if backend is None:
        _overrides.pop(op, None)
        return
    chosen = _registry.values() if op == "*" else [_registry[op]]
    known = sorted(set.intersection(*(set(backends) for backends in chosen)))
    if backend not in known:
        raise UnknownBackend(f"{op} has no backend {backend!r}; there are {known}")
    _overrides[op] = backend


@contextmanager
def overridden(op: str, backend: str) -> Iterator[None]:
    """`override` for a block of code."""
    before = _overrides.get(op)
    override(op, backend)
    try:
        yield
    finally:
        override(op, before)


def read_environment() -> None:
    """Apply the environment's overrides; called once all backends are registered.

    Raises UnknownBackend at import for a misspelt op or backend, rather than computing by another.
    """
    for entry in filter(None, os.environ.get(ENVIRONMENT, "").split(",")):
        op, _, backend = entry.partition("=")
        override(op.strip(), backend.strip())
