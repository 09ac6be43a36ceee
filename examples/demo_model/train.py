"""Train the demo model: seeded, resumable, limited by wall clock.

The learning rates warm up over the first steps, stay constant for `--minutes` and fall linearly
to nearly nothing within `--decay-minutes`. A checkpoint is a dict of "m" (model), "muon", "adam"
(optimiser states), "step" and "seen" (tokens, padding included). A resumed run has a clock, a
warm-up and a stretch of dialogues of its own. It can also start from a folder of exported weights,
where no checkpoint is left: the optimisers then begin afresh.
"""

from __future__ import annotations

import argparse
import math
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from corpus import NAMES, Batches
from export import load
from model import Model
from optimiser import ADAM_RATE, optimisers
from tokenizers import Tokenizer
from torch import Tensor

AUX_WEIGHT = 0.01
SKIP_SHARE = 0.5
"""Of batches whose positions skip a stretch, so that short rows teach far distances too."""
CONTEXT_SHARE = 0.2
"""Share of the tokens not written by the assistant that enter the loss, drawn anew each step."""
WARMUP_STEPS = 60
LEAST_RATE = 0.02
"""Share of the learning rate at which the decay stops."""
SEED_STRIDE = 1000003
COMPUTE = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass
class Loss:
    """What one batch gives."""

    total: Tensor
    """Weighted mean over the targets, without the aux loss."""
    aux: Tensor
    loads: Tensor
    own: float
    """Mean cross entropy of the assistant's tokens, nats."""
    right: float
    """Share of the assistant's tokens that are the most probable one."""


def positions_of(length: int, context: int) -> Tensor:
    """int64 [length]: 0, 1, 2, ..., with a jump at a random place in SKIP_SHARE of the calls, none
    past `context` (positional skip-wise training, Zhu et al. 2023, arXiv:2309.10400).
    """
    positions = torch.arange(length)
    if float(torch.rand(())) < SKIP_SHARE and length < context:
        place = int(torch.randint(1, length, ()))
        positions[place:] += int(torch.randint(0, context - length + 1, ()))
    return positions


def loss_of(model: Model, ids: Tensor, weights: Tensor) -> Loss:
    """ids, weights [rows, length]: every token but the first of a row is a target."""
    positions = positions_of(ids.shape[1] - 1, model.shape.context)
    hidden = model(ids[:, :-1], positions=positions)
    targets, weights = ids[:, 1:], weights[:, 1:]
    drawn = torch.rand(targets.shape) < CONTEXT_SHARE
    keep = (weights == 1.0) | ((weights > 0) & drawn)
    targets, weights = targets[keep], weights[keep]
    logits = model.logits(hidden.states[keep])
    losses = F.cross_entropy(logits, targets, reduction="none")
    own = weights == 1.0
    right = (logits.argmax(-1) == targets)[own].float().mean()
    total = (losses * weights).sum() / weights.sum()
    return Loss(total, hidden.aux, hidden.loads, float(losses[own].detach().mean()), float(right))


def rate_share(step: int, seconds: float, steady_s: float, decay_s: float) -> float:
    """Share of the learning rate at `step` after so many seconds."""
    warm = min(1.0, (step + 1) / WARMUP_STEPS)
    if seconds < steady_s:
        return warm
    return warm * max(LEAST_RATE, (steady_s + decay_s - seconds) / decay_s)


class Trainer:
    """All state of a run."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        torch.manual_seed(options.seed)
        self.tokenizer = Tokenizer.from_file(str(options.tokenizer))
        self.model = Model(compute=COMPUTE[options.compute])
        self.muon, self.adam = optimisers(self.model, options.rate)
        self.step, self.seen = 0, 0

    def save(self) -> None:
        """Write `last.pt` beside and rename it: a run that dies leaves the one before."""
        state = {
            "m": self.model.state_dict(),
            "muon": self.muon.state_dict(),
            "adam": self.adam.state_dict(),
            "step": self.step,
            "seen": self.seen,
        }
        partial = self.options.out / "last.pt.partial"
        torch.save(state, partial)
        partial.replace(self.options.out / "last.pt")
        print(f"saved {self.step}", flush=True)

    def restore(self, path: Path) -> None:
        """A checkpoint, or a folder of exported weights: its step is the last of `loss.csv` beside
        this script.
        """
        if path.is_dir():
            self.model.load_state_dict(load(path).state_dict())
            curve = Path(__file__).with_name("loss.csv").read_text(encoding="utf-8").split()
            self.step, self.seen = (int(cell) for cell in curve[-1].split(",")[:2])
            return
        state = torch.load(path, map_location="cpu", weights_only=True)
        self.model.load_state_dict(state["m"])
        self.muon.load_state_dict(state["muon"])
        self.adam.load_state_dict(state["adam"])
        self.step, self.seen = state["step"], state["seen"]

    def one_step(self, ids: Tensor, weights: Tensor, share: float) -> Loss:
        """Gradient, clipping, both optimisers. RuntimeError when the gradient is not finite."""
        self.muon.param_groups[0]["lr"] = self.options.rate * share
        self.adam.param_groups[0]["lr"] = ADAM_RATE * share
        loss = loss_of(self.model, ids, weights)
        torch.autograd.backward(loss.total + AUX_WEIGHT * loss.aux)
        norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0))
        if not math.isfinite(norm):
            raise RuntimeError(
                f"the gradient at step {self.step + 1} has norm {norm}: lower --rate "
                f"({self.options.rate}) and resume from the last checkpoint"
            )
        loss.total, loss.aux = loss.total.detach(), loss.aux.detach()
        self.muon.step()
        self.adam.step()
        self.model.zero_grad(set_to_none=True)
        self.step += 1
        self.seen += ids.numel()
        return loss

    def train(self) -> None:
        """Steps until the time is up, with a log line, a CSV row and a checkpoint now and then."""
        options, first_step = self.options, self.step
        seed = options.seed * SEED_STRIDE + self.step
        batches = Batches(self.tokenizer, options.corpus, seed, options.batch, options.max_len)
        steady_s, decay_s = 60 * options.minutes, 60 * options.decay_minutes
        start = logged = saved = time.monotonic()
        seen_then = self.seen
        recent: list[Loss] = []
        for ids, weights in batches:
            seconds = time.monotonic() - start
            if seconds >= steady_s + decay_s:
                break
            share = rate_share(self.step - first_step, seconds, steady_s, decay_s)
            recent.append(self.one_step(ids, weights, share))
            now = time.monotonic()
            if self.step % options.log_every == 0:
                speed = (self.seen - seen_then) / (now - logged)
                self._log(recent, share, speed, (steady_s + decay_s - (now - start)) / 60)
                recent, logged, seen_then = [], now, self.seen
            if now - saved > 60 * options.save_minutes:
                saved = now
                self.save()
        self.save()

    def _log(self, recent: list[Loss], share: float, speed: float, minutes_left: float) -> None:
        count = len(recent)
        total = sum(float(loss.total) for loss in recent) / count
        own = sum(loss.own for loss in recent) / count
        right = sum(loss.right for loss in recent) / count
        loads = torch.stack([loss.loads for loss in recent]).mean(0)
        print(
            f"step {self.step} tokens {self.seen / 1e6:.2f}M loss {total:.4f} own {own:.4f} "
            f"right {right:.4f} aux {float(recent[-1].aux):.3f} "
            f"load {float(loads.min()):.3f}-{float(loads.max()):.3f} rate {share:.2f} "
            f"{speed:.0f} tokens/s eta {minutes_left:.0f} min",
            flush=True,
        )
        with (self.options.out / "loss.csv").open("a", encoding="utf-8") as file:
            file.write(f"{self.step},{self.seen},{total:.5f},{own:.5f},{right:.5f}\n")


def main() -> None:
    here = Path(__file__).parent
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of last.pt and loss.csv")
    parser.add_argument("--corpus", choices=NAMES, default="narrow")
    parser.add_argument("--tokenizer", type=Path, default=here / "weights" / "tokenizer.json")
    parser.add_argument("--resume", type=Path, help="checkpoint or weights to continue")
    parser.add_argument("--minutes", type=float, default=62, help="at the full rate")
    parser.add_argument("--decay-minutes", type=float, default=12, help="after that")
    parser.add_argument("--rate", type=float, default=0.02, help="learning rate of Muon")
    parser.add_argument("--batch", type=int, default=8192, help="tokens a step, with padding")
    parser.add_argument("--max-len", type=int, default=1024, help="longest dialogue in tokens")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--compute",
        choices=COMPUTE,
        default="bfloat16",
        help="of matrix products; a CPU without bf16 instructions is ten times faster in float32",
    )
    parser.add_argument("--log-every", type=int, default=10, help="steps")
    parser.add_argument("--save-minutes", type=float, default=10)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    options.out.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(options)
    count = sum(weight.numel() for weight in trainer.model.parameters())
    print(f"{count / 1e6:.2f}M parameters", flush=True)
    if options.resume:
        trainer.restore(options.resume)
        print(f"resumed at step {trainer.step}", flush=True)
    trainer.train()


if __name__ == "__main__":
    main()
