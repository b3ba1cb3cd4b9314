"""`rollgrid verify`: check a verifier with fixtures, score stored trajectories again."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import itertools
import json
import pathlib
import subprocess
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .output import Exit, JsonOption, UrlOption, connect, console, emit, usage_error

if TYPE_CHECKING:
    from rollgrid_contracts.scoring import SamplesScored

    from rollgrid.client import Client
    from rollgrid.results import Group

    from .agreement import Agreement

app = typer.Typer(no_args_is_help=True, help="Check verifiers, and score stored trajectories again.")

SHOWN_CHANGES = 20


@app.command("test")
def check(
    verifier: Annotated[str, typer.Argument(help="A registered name, module:attr or name=module:attr.")],
    fixtures: Annotated[
        pathlib.Path | None, typer.Option(help="JSON lines, one case each; built-in verifiers have their own.")
    ] = None,
    runs: Annotated[int, typer.Option(min=2, max=3, help="Sets of fresh processes, each under another hash seed.")] = 2,
    timeout: Annotated[float, typer.Option(help="Seconds one verdict on a hostile text may take.")] = 10.0,
    as_json: JsonOption = False,
) -> None:
    """Check VERIFIER: full, zero and malformed fixtures, hostile texts, determinism, deadlines, no network.

    Exits 7 when something does not hold.
    """
    if importlib.util.find_spec("rollgrid_scorer") is None:
        raise usage_error("checking a verifier needs the scorer: pip install rollgrid-scorer")
    command = [sys.executable, "-m", "rollgrid_scorer.verify_test", verifier, f"--runs={runs}", f"--timeout={timeout}"]
    command += [] if fixtures is None else [f"--fixtures={fixtures}"]
    command += ["--json"] if as_json else []
    code = subprocess.run(command, check=False).returncode
    if code:
        raise typer.Exit(code)


@app.command()
def rerun(
    run: Annotated[str, typer.Option(help="The run whose stored groups are scored again.")],
    scorer: Annotated[
        list[str] | None,
        typer.Option(
            help="A recorded scorer by name (or type); name=module:attr scores it by other code; or a JSON object "
            "with type, name, params. Repeatable; default: every recorded verifier."
        ),
    ] = None,
    post: Annotated[str | None, typer.Option(help="Post the new values as rewards under this name.")] = None,
    cursor: Annotated[int, typer.Option(help="Only groups that closed behind this cursor.")] = 0,
    limit: Annotated[int | None, typer.Option(min=1, help="Stop after so many groups.")] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Exit 7 when any sample changed.")] = False,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Score the stored trajectories of RUN again, on this machine, and compare.  Nothing is sampled again.

    With --json: one object {"event": "changed" | "posted" | "agreement" | "summary", …} a line.
    """
    from .rescoring import Choice, rescored

    choices = [Choice(text, number) for number, text in enumerate(scorer or ())]
    if post is not None and len(choices) != 1:
        raise usage_error("needs exactly one --scorer: a reward is one scorer's value", "--post")
    agreements: dict[str, Agreement] = {}
    groups = posted = 0
    with connect(url) as client, contextlib.closing(client.trajectories(run, cursor=cursor, follow=False)) as stored:
        for group, scored in rescored(itertools.islice(stored, limit), choices):
            groups += 1
            for change in _compare(group, scored, agreements):
                if as_json:
                    emit({"event": "changed", **change})
            if post is not None:
                posted += _post(client, group, scored, post, as_json)
    _report(run, groups, agreements, posted if post is not None else None, as_json)
    if strict and any(agreement.changed for agreement in agreements.values()):
        raise typer.Exit(Exit.CHECK_FAILED)


def _compare(group: Group, scored: SamplesScored, agreements: dict[str, Agreement]) -> Iterable[dict[str, Any]]:
    from .agreement import Agreement

    for result in scored.results:
        old = {score.scorer: score for score in group.closed.entries[result.index].scores}
        for new in result.scores:
            agreement = agreements.setdefault(new.scorer, Agreement(new.scorer))
            change = agreement.add(group.id, result.index, old.get(new.scorer), new)
            if change is not None:
                yield change


def _post(client: Client, group: Group, scored: SamplesScored, name: str, as_json: bool) -> int:
    """Post the numbers of one group; nulls are no rewards and are left out.  The same numbers are one post."""
    rewards: list[dict[str, Any]] = []
    for result in scored.results:
        for score in result.scores:
            common: dict[str, Any] = {"index": result.index, "name": name}
            common |= {} if score.detail is None else {"detail": score.detail}
            if score.turn_values:
                rewards.append({**common, "kind": "turns", "turn_values": list(score.turn_values)})
            elif score.value is not None:
                rewards.append({**common, "kind": "scalar", "value": score.value})
    if rewards:
        digest = hashlib.sha256(json.dumps(rewards, sort_keys=True).encode()).hexdigest()[:32]
        client.post_rewards(group, rewards, source="rerun", idempotency_key=f"rerun-{group.id}-{digest}")
        if as_json:
            emit({"event": "posted", "group_id": group.id, "name": name, "rewards": len(rewards)})
    return len(rewards)


def _report(run: str, groups: int, agreements: dict[str, Agreement], posted: int | None, as_json: bool) -> None:
    if as_json:
        for agreement in agreements.values():
            emit({"event": "agreement", **agreement.to_dict()})
        emit({"event": "summary", "run": run, "groups": groups, "posted": posted})
        return
    for agreement in agreements.values():
        for line in _lines(agreement):
            print(line)
    if not agreements:
        console(stderr=True).print(f"{groups} groups of run {run}, none with a verifier to run again")
    if posted is not None:
        print(f"posted    {posted} rewards")


def _lines(agreement: Agreement) -> Iterable[str]:
    facts = agreement.to_dict()
    yield f"{agreement.scorer}: {facts['samples']} samples, {facts['compared']} compared, {facts['changed']} changed"
    for side, name in ((agreement.old, "old"), (agreement.new, "new")):
        mean = "-" if side.mean is None else f"{side.mean:.4f}"
        statuses = ", ".join(f"{count} {status}" for status, count in sorted(side.statuses.items()))
        version = f"  (version {', '.join(sorted(side.versions))})" if side.versions else ""
        yield f"  {name}  mean {mean} over {side.numbers}, {side.nulls} null: {statuses}{version}"
    for change in agreement.changes[:SHOWN_CHANGES]:
        old, new = change["old"], change["new"]
        detail = f"  {new['detail']}" if "detail" in new else ""
        yield (
            f"  {change['group_id']}[{change['index']}]  {old['value']} {old['status']} -> "
            f"{new['value']} {new['status']}{detail}"
        )
    if agreement.changed > SHOWN_CHANGES:
        yield f"  and {agreement.changed - SHOWN_CHANGES} more; --json prints all"
