"""Figures of other servers on the same machine, taken in the same run by the scripts that drive them.

The scripts and how to set the peers up are described in their own README; a peer that is not there gives `None`
and one line that says why.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

DEFAULT_SCRIPTS = Path(__file__).resolve().parent.parent.parent / "shared" / "peers"
TIMEOUT_S = 600.0


def llamacpp_turn(
    model: Path, scripts: Path, context: int, new: int, threads: int
) -> dict[str, Any] | None:
    """Medians in milliseconds of llama.cpp's agent turn: hot resume, slot restore, restore and resume."""
    peers = os.environ.get("PEERS")
    script = scripts / "llama_agent_turn.py"
    gguf = Path(peers or "") / "models" / f"{model.name}-bf16.gguf"
    for what, there in (
        ("PEERS names no folder", bool(peers)),
        (f"{script} is not there", script.is_file()),
        (f"{gguf} is not there", gguf.is_file()),
    ):
        if not there:
            print(f"llama.cpp: not measured, {what}", file=sys.stderr)
            return None
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "turn.jsonl"
        command = [sys.executable, str(script), "--model", str(gguf), "--reps", "3"]
        command += ["--ctx", str(context), "--tool", str(new), "--threads", str(threads)]
        done = subprocess.run(
            [*command, "--json", str(out)],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
            cwd=scripts,
        )
        if done.returncode != 0:
            print(f"llama.cpp: failed: {done.stderr[-500:]}", file=sys.stderr)
            return None
        result = json.loads(out.read_text(encoding="utf-8").splitlines()[-1])["res"]
    return {name: value["median"] for name, value in result.items() if name.endswith("_ms")}
