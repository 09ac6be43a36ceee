"""The checked-in protobuf code is what the proto says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from moorage.sessions.proto import sessions_pb2 as pb

PROTO = Path(pb.__file__).parent


def test_generated_code_is_what_the_proto_gives(tmp_path: Path) -> None:
    subprocess.run([sys.executable, str(PROTO / "generate.py"), str(tmp_path)], check=True)
    for name in ("sessions_pb2.py", "sessions_pb2.pyi", "sessions_pb2_grpc.py"):
        assert (tmp_path / name).read_text() == (PROTO / name).read_text(), name


def test_every_call_of_the_design_is_served() -> None:
    calls = {m.name for m in pb.DESCRIPTOR.services_by_name["Sessions"].methods}
    assert calls == {
        "Create", "Generate", "SubmitToolResults", "Attach", "Park", "Resume", "Cancel", "Close",
        "Get",
    }  # fmt: skip


def test_messages_and_calls_are_commented() -> None:
    lines = (PROTO / "moorage" / "v1" / "sessions.proto").read_text().splitlines()
    for before, line in zip(lines, lines[1:], strict=False):
        if re.match(r"\s*rpc ", line):
            assert before.strip().startswith("//"), line
