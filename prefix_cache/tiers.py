"""Tier jobs: what an engine asks of the tiers, done on worker threads, each answered by exactly one
completion.

    engine thread ──park/load/delete──▶ bounded queue ──▶ worker ──▶ store
          ▲                                                  │
          └──────────────── on_done(ParkDone │ LoadDone │ DeleteDone)

Each tier has its own threads and queues, so that a silent Redis delays nobody who does not need it.
A session's jobs on a tier go to one thread, in order. `on_done` is called on a worker thread and
must not block.
"""

from __future__ import annotations

import queue
import threading
import time
import traceback
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

import structlog

from moorage.prefix_cache.block import Namespace
from moorage.prefix_cache.errors import (
    CacheError,
    InvalidInput,
    QueueFull,
    StoreError,
    StoreTimeout,
    WorkersClosed,
)
from moorage.prefix_cache.frame import FrameKey
from moorage.prefix_cache.host_store import HostStore
from moorage.prefix_cache.lanes import Lanes
from moorage.prefix_cache.load import LoadDone, LoadJob, run_load
from moorage.prefix_cache.misses import MissReason
from moorage.prefix_cache.park import ParkDone, ParkJob, run_park
from moorage.prefix_cache.store import BlockStore, validate_session_id

__all__ = [
    "Completion",
    "DeleteDone",
    "DeleteJob",
    "LoadDone",
    "LoadJob",
    "MissReason",
    "ParkDone",
    "ParkJob",
    "TierWorkers",
]

_log = structlog.get_logger("moorage.prefix_cache")


@dataclass(frozen=True)
class DeleteJob:
    """Frames that a session no longer needs in one tier:
    `ParkedContext.keys_by_tier(without=newer)`.

    Run keys belong in it: a run frame is shared and stays, but this session's claim on it ends.
    """

    session_id: str
    namespace: Namespace
    keys: Sequence[FrameKey]
    tier: str
    deadline_s: float
    job_id: int = 0


@dataclass(frozen=True)
class DeleteDone:
    """A delete is best effort: what could not be deleted goes by age."""

    session_id: str
    error: CacheError | None
    job_id: int = 0


Job: TypeAlias = ParkJob | LoadJob | DeleteJob
Completion: TypeAlias = ParkDone | LoadDone | DeleteDone


@dataclass
class _Worker:
    thread: threading.Thread
    jobs: queue.Queue[tuple[Job, float] | None]
    """(job, time.monotonic() of its submission); None wakes the thread up to end."""


@dataclass
class _Tier:
    workers: list[_Worker] = field(default_factory=list)


class TierWorkers:
    """See the module. Threads are daemons: one that hangs in a store cannot keep the process
    alive.
    """

    def __init__(
        self,
        stores: Sequence[BlockStore],
        on_done: Callable[[Completion], None],
        *,
        num_workers: int = 2,
        queue_len: int = 256,
        host_copies: bool = False,
    ) -> None:
        """`num_workers` threads per tier; `queue_len` jobs may wait at each, one more is refused
        with QueueFull. `host_copies`: the host store, where there is one, also keeps frames whose home
        is another tier, and is asked first.
        """
        if num_workers < 1 or queue_len < 1:
            raise InvalidInput(
                f"num_workers is {num_workers} and queue_len {queue_len}; both must be 1 or more"
            )
        self.stores: Mapping[str, BlockStore] = {store.tier: store for store in stores}
        host = next((store for store in stores if isinstance(store, HostStore)), None)
        self._copies = host if host_copies else None
        self._lanes = Lanes()
        self._on_done = on_done
        self._closing = threading.Event()
        self._submit_lock = threading.Lock()
        self._tiers: dict[str, _Tier] = {}
        for tier in self.stores:
            self._tiers[tier] = _Tier([self._start(tier, n, queue_len) for n in range(num_workers)])

    # -- jobs, from any thread; none waits ---------------------------------------------------------

    def park(self, job: ParkJob) -> None:
        """Store a context. Raises QueueFull, WorkersClosed or InvalidInput; then nothing was
        accepted.
        """
        job.validate()
        self._submit(job, job.tier, job.session_id)

    def load(self, job: LoadJob) -> None:
        """Bring a context's frames back. Raises like `park`."""
        job.validate()
        # With several tiers in one manifest the last one (the slowest to be needed) does the work.
        tiers = [ref.tier for ref in job.manifest.frames if ref.tier in self.stores]
        tier = tiers[-1] if tiers else next(iter(self.stores))
        self._submit(job, tier, job.manifest.session_id)

    def delete(self, job: DeleteJob) -> None:
        """Let frames go. Raises like `park`."""
        validate_session_id(job.session_id)
        self._submit(job, job.tier, job.session_id)

    def close(self, deadline_s: float) -> None:
        """Refuse new jobs, answer the waiting ones with WorkersClosed, wait for running ones until
        the deadline.

        Then the stores are closed, which ends what still runs in them.
        """
        with self._submit_lock:
            self._closing.set()
        deadline = time.monotonic() + deadline_s
        workers = [worker for tier in self._tiers.values() for worker in tier.workers]
        for worker in workers:
            try:
                worker.jobs.put_nowait(None)
            except queue.Full:
                continue  # a busy worker looks at _closing after each job
        for worker in workers:
            worker.thread.join(max(0.0, deadline - time.monotonic()))
        for store in self.stores.values():
            store.close()
        self._lanes.close()

    # -- inside ------------------------------------------------------------------------------------

    def _submit(self, job: Job, tier: str, session_id: str) -> None:
        found = self._tiers.get(tier)
        if found is None:
            raise InvalidInput(
                f"tier {tier!r} is not configured; there are {', '.join(self._tiers)}"
            )
        worker = found.workers[zlib.crc32(session_id.encode()) % len(found.workers)]
        with self._submit_lock:
            if self._closing.is_set():
                raise WorkersClosed("the tier workers are closed")
            try:
                worker.jobs.put_nowait((job, time.monotonic()))
            except queue.Full:
                raise QueueFull(
                    f"{worker.jobs.maxsize} jobs wait at a worker of tier {tier}, the bound:"
                    " retry later or raise queue_len"
                ) from None

    def _start(self, tier: str, number: int, queue_len: int) -> _Worker:
        jobs: queue.Queue[tuple[Job, float] | None] = queue.Queue(queue_len)
        thread = threading.Thread(
            target=self._work, args=(jobs,), name=f"moorage-{tier}-{number}", daemon=True
        )
        worker = _Worker(thread, jobs)
        thread.start()
        return worker

    def _work(self, jobs: queue.Queue[tuple[Job, float] | None]) -> None:
        while True:
            try:
                item = jobs.get(timeout=None if not self._closing.is_set() else 0)
            except queue.Empty:
                return
            if item is None:
                continue
            job, submitted = item
            later: list[Callable[[], None]] = []
            done = self._run(job, submitted, later)
            self._guard("a completion handler failed", partial(self._on_done, done), type(done))
            for task in later:
                self._guard("host memory kept no copy", task, type(done))

    @staticmethod
    def _guard(failure: str, task: Callable[[], None], completion: type) -> None:
        try:
            task()
        except Exception:
            _log.error(failure, completion=completion.__name__, trace=traceback.format_exc())

    def _run(self, job: Job, submitted: float, later: list[Callable[[], None]]) -> Completion:
        deadline = submitted + job.deadline_s
        error: CacheError | None = None
        if self._closing.is_set():
            error = WorkersClosed("the tier workers closed before this job's turn")
        elif time.monotonic() >= deadline:
            error = StoreTimeout(
                f"the job waited {job.deadline_s} s for a worker, its whole deadline"
            )
        try:
            match job:
                case ParkJob():
                    return job.failed(error) if error else self._park(job, deadline)
                case LoadJob():
                    return job.failed(error) if error else self._load(job, deadline, later)
                case DeleteJob():
                    return DeleteDone(
                        job.session_id, error or self._delete(job, deadline), job.job_id
                    )
        except Exception as fault:
            # A defect of ours: the engine must still get its answer, or the session would hang for
            # ever.
            # The trace goes as text: a renderer that shows locals would show token ids.
            _log.error("a tier job failed", job=type(job).__name__, trace=traceback.format_exc())
            failure = StoreError(f"internal fault in a tier job: {type(fault).__name__}: {fault}")
            if isinstance(job, DeleteJob):
                return DeleteDone(job.session_id, failure, job.job_id)
            return job.failed(failure)

    def _park(self, job: ParkJob, deadline: float) -> ParkDone:
        return run_park(job, self.stores, deadline, self._copies)

    def _load(self, job: LoadJob, deadline: float, later: list[Callable[[], None]]) -> LoadDone:
        return run_load(job, self.stores, deadline, self._copies, lanes=self._lanes, later=later)

    def _delete(self, job: DeleteJob, deadline: float) -> CacheError | None:
        remaining = max(0.0, deadline - time.monotonic())
        try:
            self.stores[job.tier].delete(job.keys, job.session_id, job.namespace, remaining)
        except CacheError as error:
            return error
        return None
