"""The order in which cached blocks give way: a pure function, so that a policy is tested without a
tree.

Order: superseded blocks first (rewound away, nobody will ask for them in their own right), then the
least recently used by a logical clock (the tree's operation counter: no wall time, so that a replay
evicts the same blocks), then the deepest of a context (its loss costs least: what stands before it
stays usable). Eviction goes tail first, block by block, so that a node shrinks before it goes.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Candidate:
    """A run of unlocked blocks at the end of a leaf, all of one age."""

    last_used: int
    """Logical clock of the last operation that used these blocks."""
    superseded: bool
    """Rewound away; a later match clears it."""
    end_block: int
    """Number of blocks from the lineage root to the run's end: its depth."""
    num_blocks: int
    """Blocks in the run; at least 1."""


def eviction_key(candidate: Candidate) -> tuple[bool, int, int]:
    """Sort key: the smallest is evicted first."""
    return (not candidate.superseded, candidate.last_used, -candidate.end_block)
