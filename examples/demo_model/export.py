"""Write a checkpoint as Hugging Face files: bf16 safetensors, config, tokenizer, chat template.

Everything is first written to a folder beside `--out` and checked there against transformers;
then each file is renamed into place, so that a reader never sees half of one, and a checkpoint
that fails the check replaces nothing.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from chat import encode
from corpus import draw
from model import Model, Shape, hugging_face_views, import_weights
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

LARGEST_ERROR = 1e-4
"""Largest difference of a logit from transformers' in fp32, as a share of the largest logit."""


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def write_files(model: Model, tokenizer: Path, template: Path, folder: Path) -> None:
    """All files of the model, in an existing folder."""
    views = hugging_face_views(model).items()
    weights = {name: view.to(torch.bfloat16).clone() for name, view in views}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    _write(folder / "config.json", model.shape.hugging_face())
    generation = {"eos_token_id": 2, "pad_token_id": 0, "do_sample": False}
    _write(folder / "generation_config.json", generation)
    words = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": model.shape.context,
        "clean_up_tokenization_spaces": False,
    }
    _write(folder / "tokenizer_config.json", words)
    shutil.copyfile(tokenizer, folder / "tokenizer.json")
    shutil.copyfile(template, folder / "chat_template.jinja")


def load(folder: Path, compute: torch.dtype = torch.float32) -> Model:
    """The training model with the weights of an exported folder."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    model = Model(Shape.from_hugging_face(config), compute)
    import_weights(model, load_file(folder / "model.safetensors"))
    return model.eval()


@torch.no_grad()
def relative_error(folder: Path, num_dialogues: int = 4) -> float:
    """Largest difference of the logits from transformers', fp32, over the largest logit."""
    from transformers import AutoModelForCausalLM

    model = load(folder)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    rng = random.Random("export")
    worst = 0.0
    for _ in range(num_dialogues):
        ids = torch.tensor([encode(tokenizer, draw("narrow", rng))[0]])
        expected = reference(ids).logits
        difference = (model.logits(model(ids).states) - expected).abs().max()
        worst = max(worst, float(difference / expected.abs().max()))
    return worst


def export(model: Model, tokenizer: Path, template: Path, folder: Path) -> float:
    """Write, check, publish; returns the error against transformers.

    RuntimeError when it is too large; the files in `folder` then stay as they were.
    """
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as name:
        staged = Path(name)
        write_files(model, tokenizer, template, staged)
        error = relative_error(staged)
        if not error < LARGEST_ERROR:
            raise RuntimeError(
                f"logits differ from transformers' by {error:.2e} of the largest, allowed is "
                f"{LARGEST_ERROR:.0e}: model.py and the export disagree, nothing was replaced"
            )
        for path in sorted(staged.iterdir()):
            path.chmod(0o644)
            path.replace(folder / path.name)
    return error


def main() -> None:
    here = Path(__file__).parent
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder of the model's files")
    parser.add_argument("--tokenizer", type=Path, default=here / "weights" / "tokenizer.json")
    parser.add_argument("--template", type=Path, default=here / "chat_template.jinja")
    options = parser.parse_args()
    torch.set_num_threads(1)
    state = torch.load(options.checkpoint, map_location="cpu", weights_only=True)
    model = Model()
    model.load_state_dict(state["m"])
    error = export(model, options.tokenizer, options.template, options.out)
    print(
        f"step {state['step']}, {state['seen']} tokens -> {options.out}; "
        f"largest error against transformers {error:.1e}"
    )


if __name__ == "__main__":
    main()
