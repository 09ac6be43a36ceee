"""The command `moorage`: serve and demo."""

from __future__ import annotations

import asyncio
import sys
from importlib import resources
from pathlib import Path
from typing import Annotated, Literal, NoReturn

import typer
from rich.console import Console
from rich.markup import escape

app = typer.Typer(
    help="Keeps an agent's context alive while its tools run.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
_errors = Console(stderr=True, soft_wrap=True)

LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
WARM_BYTES = 64 << 20
"""Host memory for parked KV that is ready before the first session."""
EXIT_USAGE = 2
"""Something that was asked for cannot be used: model, address, data directory, Redis."""


def main() -> None:
    """Entry point of the `moorage` script."""
    app()


def default_model_dir() -> Path:
    """The model that comes with the package; beside the source tree where it is not installed.

    Raises FileNotFoundError naming both places.
    """
    tried: list[str] = []
    try:
        packaged = Path(str(resources.files("moorage.demo_model")))
        tried.append(str(packaged))
        if (packaged / "config.json").is_file():
            return packaged
    except ModuleNotFoundError:
        tried.append("the package moorage.demo_model")
    source = Path(__file__).resolve().parent.parent / "examples" / "demo_model" / "weights"
    if (source / "config.json").is_file():
        return source
    tried.append(str(source))
    raise FileNotFoundError(
        f"no model found in {' or '.join(tried)}: name a folder with config.json with --model"
    )


@app.command()
def serve(
    model: Annotated[
        Path | None,
        typer.Option(
            help="Folder with config.json, *.safetensors, tokenizer.json; default: the shipped model."
        ),
    ] = None,
    listen: Annotated[
        str, typer.Option(help="HOST:PORT; port 0 takes a free one.")
    ] = "127.0.0.1:50051",
    redis: Annotated[
        str | None,
        typer.Option(
            help="Parked KV in Redis: redis://…, rediss://…, redis+sentinel://… or redis+cluster://…"
        ),
    ] = None,
    disk_gib: Annotated[
        float, typer.Option(help="GiB of parked KV on disk, in the data directory; 0: none.")
    ] = 0.0,
    kv_codec: Annotated[
        Literal["raw", "int8"],
        typer.Option(help="Parked KV as it is, or in half the room and no longer exact."),
    ] = "raw",
    data_dir: Annotated[
        Path, typer.Option(help="Where sessions are kept; one process at a time.")
    ] = Path("moorage-data"),
    tokens: Annotated[
        Path | None, typer.Option(help="File of bearer tokens, one 'TOKEN TENANT' a line.")
    ] = None,
    durability: Annotated[
        Literal["process", "power"],
        typer.Option(help="What a commit survives: kill -9, or a power cut too."),
    ] = "process",
    kv_mib: Annotated[int, typer.Option(help="MiB of device memory for KV.")] = 512,
    threads: Annotated[int, typer.Option(help="CPU threads of the model; 0: torch's choice.")] = 0,
    drain_s: Annotated[
        float, typer.Option(help="Seconds that running turns get at a shutdown.")
    ] = 20.0,
    nan_fill: Annotated[
        bool, typer.Option("--nan-fill", help="Fill freed KV blocks with NaN (tests, demo).")
    ] = False,
    json_logs: Annotated[bool, typer.Option("--json-logs", help="Log JSON lines.")] = False,
) -> None:
    """Serve sessions. Prints one line, `moorage ready on HOST:PORT`, when calls are answered."""
    from moorage.sessions import log
    from moorage.sessions.errors import MoorageError

    log.configure(json_lines=json_logs or not sys.stderr.isatty())
    from moorage.engine import Engine, EngineConfig, EngineError, TierConfig
    from moorage.sessions.limits import Limits
    from moorage.sessions.server import ServerConfig, parse_listen
    from moorage.sessions.server import serve as run_server

    if disk_gib < 0:
        _fail(f"--disk-gib is {disk_gib}, allowed is 0 (none) or more")
    if kv_mib < 1:
        _fail(f"--kv-mib is {kv_mib}, allowed is 1 or more")
    try:
        host, _ = parse_listen(listen)
        if tokens is None and host not in LOOPBACK:
            _errors.print(
                f"[yellow]moorage:[/] {escape(host)} may be reached from other machines and everyone is let in:"
                " name bearer tokens with --tokens",
                highlight=False,
            )
        config = EngineConfig(
            model_dir=model or default_model_dir(),
            kv_bytes=kv_mib << 20,
            num_threads=threads,
            fill_freed_with_nan=nan_fill,
            tiers=TierConfig(
                redis_url=redis,
                codec=kv_codec,
                warm_bytes=WARM_BYTES,
                disk_dir=data_dir / "kv" if disk_gib else None,
                disk_bytes=max(1, int(disk_gib * (1 << 30))),
            ),
        )
        server = ServerConfig(
            listen=listen,
            data_dir=data_dir,
            durability=durability,
            tokens_file=tokens,
            limits=Limits(drain_s=drain_s),
        )
        status = asyncio.run(run_server(lambda: Engine(config), server, announce=_announce))
    except (MoorageError, EngineError, OSError, ValueError) as error:
        _fail(str(error))
    raise typer.Exit(status)


@app.command()
def demo(
    redis: Annotated[
        str | None,
        typer.Option(help="redis://… : park there, kill the server, and resume in a new one."),
    ] = None,
) -> None:
    """Run a tool-calling agent on a parked and resumed session, and check what it did."""
    from moorage.sessions.demo import run_demo

    raise typer.Exit(run_demo(redis))


def _announce(address: str) -> None:
    """One line that a program can read, whole and at once."""
    print(f"moorage ready on {address}", flush=True)


def _fail(message: str) -> NoReturn:
    _errors.print("[bold red]moorage:[/]", escape(message), highlight=False)
    raise typer.Exit(EXIT_USAGE)


if __name__ == "__main__":
    main()
