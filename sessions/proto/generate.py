"""Regenerate the protobuf code of this folder from `moorage/v1/sessions.proto`.

protoc writes imports that follow the proto's own path (`from moorage.v1 import …`), which is not
where the code lives; the one line is rewritten. Usage: `python sessions/proto/generate.py [output
folder]`.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from grpc_tools import protoc

HERE = Path(__file__).resolve().parent
GENERATED = ("sessions_pb2.py", "sessions_pb2.pyi", "sessions_pb2_grpc.py")


def generate(output: Path) -> None:
    """Write the three generated files into `output`. Raises RuntimeError when protoc refuses the
    proto.
    """
    with tempfile.TemporaryDirectory() as scratch:
        status = protoc.main(
            [
                "protoc",
                f"--proto_path={HERE}",
                f"--python_out={scratch}",
                f"--pyi_out={scratch}",
                f"--grpc_python_out={scratch}",
                "moorage/v1/sessions.proto",
            ]
        )
        if status != 0:
            raise RuntimeError(
                f"protoc ended with status {status} for {HERE}/moorage/v1/sessions.proto"
            )
        output.mkdir(parents=True, exist_ok=True)
        for name in GENERATED:
            target = output / name
            shutil.copyfile(Path(scratch) / "moorage" / "v1" / name, target)
            text = target.read_text(encoding="utf-8")
            target.write_text(
                text.replace("from moorage.v1 import", "from moorage.sessions.proto import"),
                encoding="utf-8",
            )


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE)
