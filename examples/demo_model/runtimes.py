"""The model under Moorage's engine and under transformers, for the evaluation."""

from __future__ import annotations

import itertools
import queue
from pathlib import Path

import torch
from export import load
from generate import END, Generator, PlainGenerator, common_len

WAIT_S = 120.0
RUNTIMES = ("plain", "engine", "transformers")


class EngineGenerator:
    """Moorage's own engine, fp32. Its prefix cache keeps what calls have in common."""

    def __init__(self, folder: Path, num_threads: int) -> None:
        from moorage.engine import Engine, EngineConfig, StepOutput

        self._outputs: queue.Queue[StepOutput] = queue.Queue()
        config = EngineConfig(folder, dtype="float32", num_threads=num_threads)
        self._engine = Engine(config)
        self._engine.start(self._outputs.put)
        self._numbers = itertools.count()

    def generate(self, ids: list[int], limit: int) -> list[int]:
        """See Generator. RuntimeError where the engine refuses or fails."""
        from moorage.engine import Namespace, Release, Request, SamplingParams, Submit, pack_tokens

        name = f"item-{next(self._numbers)}"
        namespace = Namespace("evaluation", "default")
        request = Request(
            request_id=name,
            session_id=name,
            namespace=namespace,
            token_ids=pack_tokens(ids),
            num_prompt=len(ids),
            num_known=0,
            sampling=SamplingParams(max_tokens=limit),
        )
        self._engine.send(Submit(request))
        found: list[int] = []
        while True:
            for output in self._outputs.get(timeout=WAIT_S).tokens:
                if output.request_id != name:
                    continue
                if output.error is not None:
                    raise RuntimeError(f"the engine: {output.error.message}")
                if output.token_id is not None and output.token_id != END:
                    found.append(output.token_id)
                if output.finish_reason is not None:
                    self._engine.send(Release(name, namespace, None))
                    return found

    def close(self) -> None:
        """Stop the engine's thread."""
        self._engine.close()


class TransformersGenerator:
    """transformers' own Qwen3-MoE in fp32 with its own cache."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM, DynamicCache

        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._new_cache = DynamicCache
        self._cache = DynamicCache()
        self._cached: list[int] = []

    @torch.no_grad()
    def _feed(self, ids: list[int]) -> int:
        output = self._model(
            torch.tensor([ids]), past_key_values=self._cache, use_cache=True, logits_to_keep=1
        )
        self._cached += ids
        return int(output.logits[0, -1].argmax())

    def generate(self, ids: list[int], limit: int) -> list[int]:
        """See Generator."""
        common = common_len(self._cached, ids[:-1])
        if not common:
            self._cache = self._new_cache()
        elif common < len(self._cached):
            self._cache.crop(common - len(self._cached))  # so many tokens off the end
        self._cached = ids[:common]
        found: list[int] = []
        token = self._feed(ids[common:])
        while token != END and len(found) < limit:
            found.append(token)
            token = self._feed([token])
        return found


def open_runtime(name: str, folder: Path, num_threads: int) -> Generator:
    """The model of a folder in one of RUNTIMES."""
    if name == "engine":
        return EngineGenerator(folder, num_threads)
    if name == "transformers":
        return TransformersGenerator(folder)
    return PlainGenerator(load(folder))
