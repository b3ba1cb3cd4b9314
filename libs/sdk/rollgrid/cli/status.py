"""`rollgrid status`: every part, whether it works, what it runs, and how much waits."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any

import typer

from rollgrid.stack.home import PartState, StackState, find_home, find_stack
from rollgrid.stack.probes import get_json

from .output import Exit, JsonOption, console, emit
from .table import parts_table, uptime, wide_console

_SHOWN_ELSEWHERE = {"instance", "service", "worker", "port", "version", "fingerprint", "pool", "policy", "engine"}


def status(
    as_json: JsonOption = False,
    wait: Annotated[float, typer.Option(help="Seconds to wait until everything is ready.")] = 0.0,
) -> None:
    """Show the stack on this machine; exit code 0 when every part is ready."""
    import time

    deadline = time.monotonic() + wait
    while True:
        state = find_stack()
        report = None if state is None else survey(state)
        if (report is not None and report["ready"]) or time.monotonic() >= deadline:
            break
        time.sleep(0.2)
    if state is None or report is None:
        _absent(as_json)
        raise typer.Exit(Exit.UNREACHABLE)
    if as_json:
        emit(report)
    else:
        _print(state, report)
    if not report["ready"]:
        raise typer.Exit(Exit.UNREACHABLE)


def survey(state: StackState) -> dict[str, Any]:
    """What the supervisor knows and what every service says of itself now, as one JSON-compatible object."""
    services = [part for part in state.parts if part.kind == "service"]
    headers = {"Authorization": f"Bearer {state.api_key}"}
    with ThreadPoolExecutor(len(services) + 2) as pool:
        answers = list(pool.map(lambda part: get_json(f"{part.url}/readyz"), services))
        fleet_status, fleet = pool.submit(get_json, f"{state.url}/v1/fleet", headers).result()
        _, policies = pool.submit(get_json, f"{state.url}/v1/policies", headers).result()
    said = dict(zip((part.name for part in services), answers, strict=True))
    parts = [_part(part, *said.get(part.name, (None, {}))) for part in state.parts]
    return {
        "ready": all(part["state"] == "ready" for part in parts),
        "url": state.url,
        "home": str(find_home()),
        "engine": state.engine,
        "policy": state.policy,
        "model": state.model,
        "started_at": state.started_at,
        "supervisor": state.supervisor.pid,
        "parts": parts,
        "workers": fleet.get("workers", []) if fleet_status == 200 else [],
        "queues": fleet.get("queues", {}) if fleet_status == 200 else {},
        "policies": policies.get("policies", policies.get("data", [])),
    }


def _part(part: PartState, code: int | None, body: dict[str, Any]) -> dict[str, Any]:
    state, problems = part.state, dict(part.problems)
    if code is not None and code != 200 and state == "ready":  # newer than what the supervisor knows
        state = "not_ready"
        problems = body.get("problems") or {"door": body.get("error", f"HTTP {code}")}
    return {
        "name": part.name,
        "kind": part.kind,
        "state": state,
        "pid": part.process.pid if part.process else None,
        "url": part.url,
        "version": part.version or str(body.get("version", "")),
        "restarts": part.restarts,
        "problems": problems,
        "facts": {name: value for name, value in body.items() if name not in ("status", "problems", "error")},
        "log": part.log,
    }


def _print(state: StackState, report: dict[str, Any]) -> None:
    import msgspec

    screen = wide_console()
    shown = tuple(
        msgspec.structs.replace(part, state=row["state"], problems=row["problems"], version=row["version"])
        for part, row in zip(state.parts, report["parts"], strict=True)
    )
    screen.print(parts_table(shown, {row["name"]: _facts(row["facts"]) for row in report["parts"]}))
    for worker in report["workers"]:
        loaded = ", ".join(f"{v['policy']}@{v['version']}" for v in worker.get("loaded", [])) or "nothing"
        screen.print(
            f"worker {worker['worker']}: {loaded} · {worker.get('engine')} {worker.get('dtype', '')} · "
            f"{worker.get('busy', 0)}/{worker['slots']} slots busy"
        )
    for line in _queue_lines(report["queues"]):
        screen.print(line)
    ready = "[bold green]ready[/]" if report["ready"] else "[bold red]not ready[/]"
    screen.print(f"{ready}  {state.url}  engine {state.engine}, policy {state.policy}, up {uptime(state)}")


def _facts(facts: dict[str, Any]) -> str:
    """Numbers and short texts a service reports, on one line."""
    words = []
    for name, value in facts.items():
        if name in _SHOWN_ELSEWHERE or value is None or isinstance(value, (dict, list)):
            continue
        words.append(f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={str(value)[:24]}")
    return " ".join(words)


def _queue_lines(queues: dict[str, Any]) -> list[str]:
    """One line a stream: what it holds of its bound, and what waits for each reader."""
    lines = []
    for name, queue in queues.items():
        if not isinstance(queue, dict):
            lines.append(f"queue {name}: {queue}")
            continue
        readers = " · ".join(
            f"{reader} {depth.get('pending', 0)} waiting, {depth.get('unacked', 0)} in hand"
            for reader, depth in queue.get("consumers", {}).items()
        )
        full = 100 * queue.get("bytes", 0) / max(1, queue.get("max_bytes", 1))
        lines.append(f"{name}  {queue.get('messages', 0)} messages, {full:.1f} % full  {readers}".rstrip())
    return lines


def _absent(as_json: bool) -> None:
    if as_json:
        emit({"ready": False, "home": str(find_home()), "parts": []})
    else:
        console(stderr=True).print(f"no stack runs in {find_home()}; start one with `rollgrid up`")
