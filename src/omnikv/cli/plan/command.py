"""`omnikv plan`, from its options to its exit status."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from omnikv.cli.console import EXIT_FAILED, console, exit_status_of, require_writable, write_json
from omnikv.cli.plan.drawing import as_svg
from omnikv.cli.plan.figures import PlanRequest, Stage, make_plan
from omnikv.cli.plan.table import print_plan
from omnikv.cli.ranks.errors import RunFailed
from omnikv.core.partition import Parallel
from omnikv.errors import ConfigError, OmniKVError

_HEADS_HELP = "KV-head ids of each {} rank, as 0,1/2 for two ranks, instead of sizes."
_BLOCK_HELP = "Deal the {}'s tokens in turn, in blocks of so many."
_ZIGZAG_HELP = "Give each of the {}'s context-parallel ranks a chunk from either end."


def plan(
    kv_heads: Annotated[int, typer.Option(help="KV heads of the model, over all ranks.")] = 8,
    layers: Annotated[int, typer.Option(help="Layers of the model.")] = 32,
    from_tp: Annotated[int, typer.Option(help="Tensor-parallel size of the source.")] = 1,
    to_tp: Annotated[int, typer.Option(help="Tensor-parallel size of the target.")] = 1,
    from_pp: Annotated[int, typer.Option(help="Pipeline-parallel size of the source.")] = 1,
    to_pp: Annotated[int, typer.Option(help="Pipeline-parallel size of the target.")] = 1,
    from_cp: Annotated[int, typer.Option(help="Context-parallel size of the source.")] = 1,
    to_cp: Annotated[int, typer.Option(help="Context-parallel size of the target.")] = 1,
    from_cp_block: Annotated[int | None, typer.Option(help=_BLOCK_HELP.format("source"))] = None,
    to_cp_block: Annotated[int | None, typer.Option(help=_BLOCK_HELP.format("target"))] = None,
    from_cp_zigzag: Annotated[bool, typer.Option("--from-cp-zigzag", help=_ZIGZAG_HELP.format("source"))] = False,
    to_cp_zigzag: Annotated[bool, typer.Option("--to-cp-zigzag", help=_ZIGZAG_HELP.format("target"))] = False,
    from_heads: Annotated[str | None, typer.Option(help=_HEADS_HELP.format("source"))] = None,
    to_heads: Annotated[str | None, typer.Option(help=_HEADS_HELP.format("target"))] = None,
    lost: Annotated[str, typer.Option(help="Source ranks that are gone, as 1,3: what their replicas make good.")] = "",
    latent: Annotated[bool, typer.Option("--latent", help="One latent without heads a layer, as MLA keeps.")] = False,
    tokens: Annotated[int, typer.Option(help="Tokens of the request.")] = 4096,
    head_dim: Annotated[int, typer.Option(help="Elements of a head, or of a latent.")] = 128,
    dtype: Annotated[str, typer.Option(help="What an element is.")] = "bfloat16",
    svg: Annotated[Path | None, typer.Option(help="Draw the plan into this SVG file.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the plan to this file as JSON.")] = None,
) -> None:
    """Show who sends which part of a KV cache to whom between two layouts, and prove that nothing is left out.

    The exit status is 1 when some part of a target is not covered, or covered twice.
    """
    notes = console(stderr=True)
    try:
        require_writable("--svg", svg)
        require_writable("--json", json_file)
        source = Parallel(tp=from_tp, pp=from_pp, cp=from_cp, cp_block=from_cp_block, cp_zigzag=from_cp_zigzag)
        target = Parallel(tp=to_tp, pp=to_pp, cp=to_cp, cp_block=to_cp_block, cp_zigzag=to_cp_zigzag)
        request = PlanRequest(
            source=_stage("from", source, from_heads),
            target=_stage("to", target, to_heads),
            num_kv_heads=1 if latent else kv_heads,
            num_layers=layers,
            num_tokens=tokens,
            head_dim=head_dim,
            dtype=dtype,
            tensors=1 if latent else 2,
            lost=_numbers("--lost", lost) if lost else (),
        )
        figures = make_plan(request)
        print_plan(console(stderr=False), figures)
        if svg is not None:
            _write(as_svg(figures), svg)
        if json_file is not None:
            write_json(figures.as_json(), json_file)
    except OmniKVError as error:
        raise typer.Exit(exit_status_of(notes, error)) from error
    if figures.flaw is not None:
        raise typer.Exit(EXIT_FAILED)


def _stage(side: str, parallel: Parallel, heads: str | None) -> Stage:
    if heads is None:
        return Stage(parallel=parallel)
    if parallel != Parallel():
        raise ConfigError(
            f"--{side}-heads lists what each rank holds, instead of sizes; leave out the other --{side}-..."
        )
    return Stage(heads=tuple(_numbers(f"--{side}-heads", part) for part in heads.split("/")))


def _numbers(option: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(f"{option} takes whole numbers with commas between them, got {text!r}") from error


def _write(drawing: str, path: Path) -> None:
    try:
        path.write_text(drawing, encoding="utf-8")
    except OSError as error:
        raise RunFailed(f"the drawing cannot be written to {path}: {error}") from error
