"""`omnikv demo`, from its options to its exit status."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from omnikv.cli.demo.errors import DemoFailed
from omnikv.cli.demo.fetch import SMOLLM2, cache_directory, fetch_model, require_packages
from omnikv.cli.demo.plan import DemoRequest
from omnikv.cli.demo.report import WIDTH, print_result
from omnikv.cli.demo.result import DemoResult
from omnikv.cli.demo.run import run_demo
from omnikv.errors import ConfigError, OmniKVError

DEFAULT_PROMPT = "Why is the sky blue?"
EXIT_FAILED = 1
EXIT_MISUSED = 2


def demo(
    model: Annotated[
        Path | None, typer.Option(help="A local Llama-like model in the safetensors format, instead of SmolLM2-135M.")
    ] = None,
    prefill_tp: Annotated[int, typer.Option(help="How many tensor-parallel processes run the prompt.")] = 3,
    decode_tp: Annotated[int, typer.Option(help="How many tensor-parallel processes continue the text.")] = 1,
    prompt: Annotated[str, typer.Option(help="What to ask the model.")] = DEFAULT_PROMPT,
    max_tokens: Annotated[int, typer.Option(help="How many tokens to generate at most.")] = 24,
    kill_rank: Annotated[
        int | None, typer.Option(help="Kill this prefill rank before it sends, to see what every rank does.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the outcome to this file as JSON.")] = None,
    timeout_s: Annotated[float, typer.Option(help="End everything after this many seconds.")] = 300.0,
) -> None:
    """Prefill a real model on some processes, decode on others, and compare with a single process.

    The exit status is 0 only when the text is identical.
    """
    notes = _console(stderr=True)
    try:
        request = DemoRequest(
            prompt=prompt,
            prefill_tp=prefill_tp,
            decode_tp=decode_tp,
            max_tokens=max_tokens,
            timeout_s=timeout_s,
            kill_rank=kill_rank,
        )
        _require_writable(json_file)
        result = _run(request, model, notes)
        # Shown first: what took minutes is not lost to a full disk.
        print_result(_console(stderr=False), result)
        if json_file is not None:
            _write_json(result, json_file)
    except ConfigError as error:
        raise typer.Exit(_say_error(notes, error, EXIT_MISUSED)) from error
    except OmniKVError as error:
        raise typer.Exit(_say_error(notes, error, EXIT_FAILED)) from error
    if not result.identical:
        raise typer.Exit(EXIT_FAILED)


def _run(request: DemoRequest, model: Path | None, notes: Console) -> DemoResult:
    require_packages(["transformers", "safetensors"])
    with _stopped_by_sigterm(), notes.status("Starting", refresh_per_second=4) as status:

        def say(step: str) -> None:
            # A spinner shows on a terminal only; elsewhere each step is a line.
            status.update(Text(step))
            if not notes.is_terminal:
                notes.print(Text(step))

        if model is None:
            require_packages(["gguf", "accelerate"])
            model = fetch_model(SMOLLM2, cache_directory(os.environ), say)
        return run_demo(request, model, say)


def _require_writable(json_file: Path | None) -> None:
    if json_file is None:
        return
    folder = json_file.absolute().parent
    if json_file.is_dir():
        raise ConfigError(f"--json {json_file} cannot be written: it is a directory; name a file")
    if not folder.is_dir() or not os.access(json_file if json_file.exists() else folder, os.W_OK):
        what = f"{json_file} is read-only" if json_file.exists() else f"{folder} is no writable directory"
        raise ConfigError(f"--json {json_file} cannot be written: {what}")


def _write_json(result: DemoResult, path: Path) -> None:
    try:
        path.write_text(json.dumps(result.as_json(), indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise DemoFailed(f"the outcome cannot be written to {path}: {error}") from error


def _console(*, stderr: bool) -> Console:
    console = Console(stderr=stderr, highlight=False)
    # Without a terminal there is no width to ask for; on a wide one, long lines are hard to read.
    console.width = min(console.width, WIDTH) if console.is_terminal else WIDTH
    return console


def _say_error(notes: Console, error: OmniKVError, exit_status: int) -> int:
    # Lines stay whole, for the terminal to wrap or a log to keep.
    notes.print(Text.assemble(("error: ", "bold red"), str(error)), soft_wrap=True)
    return exit_status


@contextmanager
def _stopped_by_sigterm() -> Iterator[None]:
    """SIGTERM ends the block as Ctrl-C does, so that it too leaves no process and no file behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
