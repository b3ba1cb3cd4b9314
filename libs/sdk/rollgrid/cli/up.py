"""`rollgrid up` and `rollgrid down`: the whole stack on this machine."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from rollgrid.errors import ConfigurationError
from rollgrid.models.catalog import RECIPES
from rollgrid.models.prepare import prepare
from rollgrid.stack import processes
from rollgrid.stack.config import DTYPES, ENGINES, StackConfig, native_dtype, policy_name
from rollgrid.stack.home import Home, StackState, find_home, find_stack, write_private
from rollgrid.stack.supervisor import StackFailed, Supervisor, stop_stack

from .output import Exit, JsonOption, console, emit
from .table import parts_table, welcome, wide_console

if TYPE_CHECKING:
    from rich.console import Console

DEFAULT_MODELS = {"vllm": "smollm2-135m", "scripted": "tiny", "openai_http": "smollm2-135m"}
START_TIMEOUT_S = 900.0
STOP_TIMEOUT_S = 240.0


def up(
    engine: Annotated[str, typer.Option(help=f"{' | '.join(ENGINES)}")] = "vllm",
    model: Annotated[
        str | None, typer.Option(help=f"A Hugging Face folder, or {' | '.join(RECIPES)} (made on first use).")
    ] = None,
    policy: Annotated[str | None, typer.Option(help="Name to serve it under; default: the model's.")] = None,
    samplers: Annotated[int, typer.Option(min=0, help="Sampler processes, each with an engine of its own.")] = 1,
    dtype: Annotated[str, typer.Option(help=f"{' | '.join(DTYPES)}; auto = bfloat16 where the CPU has it.")] = "auto",
    device: Annotated[str, typer.Option(help="cpu | cuda")] = "cpu",
    max_model_len: Annotated[int | None, typer.Option(help="Longest prompt and output together, tokens.")] = None,
    port: Annotated[int | None, typer.Option(help="Port of the HTTP door; default 8000, or another if taken.")] = None,
    openai_url: Annotated[str | None, typer.Option(help="Running server for --engine openai_http.")] = None,
    tool_parser: Annotated[str | None, typer.Option(help="vLLM's tool-call parser of the model, e.g. hermes.")] = None,
    reasoning_parser: Annotated[str | None, typer.Option(help="vLLM's reasoning parser, e.g. qwen3.")] = None,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Return once it is ready; stop it with `rollgrid down`.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Start the stack: NATS, Valkey, S3 and the five services, without Docker; Ctrl-C drains and stops it.

    Data stays in $ROLLGRID_HOME, else ./.rollgrid if there is one, else ~/.rollgrid.
    """
    screen = wide_console(stderr=True)
    home = Home(find_home())
    running = find_stack(home.root)
    if running is not None:
        _already(running, home, screen, as_json, detach=detach)
        return
    config = make_config(
        engine=engine, model=model, policy=policy, samplers=samplers, dtype=dtype, device=device,
        max_model_len=max_model_len, port=port, openai_url=openai_url, tool_parser=tool_parser,
        reasoning_parser=reasoning_parser, say=screen.print,
    )  # fmt: skip
    if detach:
        state = start_detached(home, config, screen)
        _announce(state, screen, as_json)
        return
    run_in_front(home, config, screen, as_json)


def down(
    now: Annotated[
        bool, typer.Option("--now", help="Kill instead of draining; nothing that was accepted is lost.")
    ] = False,
    timeout: Annotated[float, typer.Option(help="Seconds to wait.")] = STOP_TIMEOUT_S,
) -> None:
    """Stop the stack that `rollgrid up` started; its data stays."""
    home = Home(find_home())
    stopped = stop_stack(home, timeout, now=now)
    console(stderr=True).print(f"stopped; data stays in {home.root}" if stopped else f"no stack runs in {home.root}")


def make_config(
    *,
    engine: str,
    model: str | None,
    policy: str | None = None,
    samplers: int = 1,
    dtype: str = "auto",
    device: str = "cpu",
    max_model_len: int | None = None,
    port: int | None = None,
    openai_url: str | None = None,
    tool_parser: str | None = None,
    reasoning_parser: str | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> StackConfig:
    """The options as a config, the model made if it is one of ours.  Raises ConfigurationError."""
    if engine not in ENGINES:
        raise ConfigurationError(f"engine {engine!r} is none of {', '.join(ENGINES)}")
    if dtype not in DTYPES:
        raise ConfigurationError(f"dtype {dtype!r} is none of {', '.join(DTYPES)}")
    name = model or DEFAULT_MODELS[engine]
    known = RECIPES.get(name)
    if known is not None:
        folder = prepare(name, verify=False, say=say).path
        max_model_len = max_model_len or known.serving_context
    else:
        folder = Path(name).expanduser().absolute()
    if dtype == "auto":
        dtype = "bfloat16" if device == "cuda" else native_dtype() if name == "smollm2-135m" else _stored_dtype(folder)
    config = StackConfig(
        model=str(folder), policy=policy or (known.name if known else policy_name(folder)), engine=engine, dtype=dtype,
        device=device, samplers=samplers, max_model_len=max_model_len, port=port, openai_url=openai_url,
        tool_parser=tool_parser, reasoning_parser=reasoning_parser,
    )  # fmt: skip
    config.check()
    return config


def _stored_dtype(folder: Path) -> str:
    """What a model folder says its weights are stored in, float32 if it says nothing we serve."""
    try:
        facts = msgspec.json.decode((folder / "config.json").read_bytes())
    except (OSError, msgspec.DecodeError):
        return "float32"
    found = str(facts.get("dtype") or facts.get("torch_dtype") or "").removeprefix("torch.")
    if found == "bfloat16":
        return native_dtype()
    return found if found in DTYPES else "float32"


def run_in_front(home: Home, config: StackConfig, screen: Console, as_json: bool = False) -> None:
    """Run the stack in this process until it is stopped, with a live table until it is ready."""
    from rich.live import Live

    announced = False
    restarts: dict[str, int] = {}
    with Live(console=screen, refresh_per_second=8, transient=True) as live:

        def show(state: StackState) -> None:
            nonlocal announced
            for part in state.parts:
                if part.restarts > restarts.get(part.name, 0):
                    restarts[part.name] = part.restarts
                    screen.print(f"{part.name} {part.problems.get('process', 'ended')}", style="yellow")
            if state.stopping or not announced:
                live.update(parts_table(state.parts))
            if state.ready and not announced:
                announced = True
                live.update("")
                screen.print(parts_table(state.parts))
                _announce(state, screen, as_json)
                screen.print("Ctrl-C drains and stops; a second one stops at once.", style="dim")

        async def main() -> None:
            await Supervisor(home, config, show).run()

        asyncio.run(main())
    screen.print(f"stopped; data stays in {home.root}")


def start_detached(home: Home, config: StackConfig, screen: Console) -> StackState:
    """Start a supervisor of its own session and wait until everything is ready.  Raises StackFailed."""
    from rich.live import Live

    home.create()
    write_private(home.config_file, msgspec.json.encode(config))
    log = home.log("supervisor")
    with log.open("ab") as out:
        begin = out.tell()
        child = subprocess.Popen(
            [sys.executable, "-m", "rollgrid.stack", str(home.root)],
            stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True, cwd=home.root,
        )  # fmt: skip
    deadline = time.monotonic() + START_TIMEOUT_S
    with Live(console=screen, refresh_per_second=8, transient=True) as live:
        while time.monotonic() < deadline:
            if child.poll() is not None:
                cause = processes.tail(log, 40, begin).removeprefix("rollgrid: ")
                raise StackFailed(f"the stack has not started: {cause}")
            state = home.read_state()
            if state is not None and state.supervisor.pid == child.pid:
                live.update(parts_table(state.parts))
                if state.ready:
                    return state
            time.sleep(0.1)
    child.terminate()
    raise StackFailed(f"the stack is not ready after {START_TIMEOUT_S:.0f} s; see {home.logs}")


def _announce(state: StackState, screen: Console, as_json: bool) -> None:
    if as_json:
        emit({"url": state.url, "policy": state.policy, "engine": state.engine, "pids": state.pids})
    else:
        screen.print(welcome(state), soft_wrap=True)


def _already(state: StackState, home: Home, screen: Console, as_json: bool, *, detach: bool) -> None:
    screen.print(
        f"a stack already runs in {home.root} (supervisor {state.supervisor.pid}), with the options of its own start; "
        "`rollgrid down` stops it"
    )
    _announce(state, screen, as_json)
    if not detach:
        raise typer.Exit(Exit.USAGE)
