"""`rollgrid sessions`: look at a multi-turn session, or end it."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import TYPE_CHECKING, Annotated

import typer
from rollgrid_contracts.episodes import MAIN_BRANCH

from .output import JsonOption, UrlOption, connect, emit
from .table import wide_console

if TYPE_CHECKING:
    from rich.tree import Tree

    from rollgrid.session_answers import NodeState, SessionState

app = typer.Typer(no_args_is_help=True, help="Look at a multi-turn session, or end it: show, cancel.")

SessionArgument = Annotated[str, typer.Argument(help="Session, as its base URL names it.")]
TEXT_WIDTH = 56


@app.command()
def show(session: SessionArgument, url: UrlOption = None, as_json: JsonOption = False) -> None:
    """Print a session's tree: turns that go on behind each other stand under each other, forks are indented."""
    with connect(url) as client:
        state = client.sessions.state(session)
    if as_json:
        emit(state)
        return
    screen = wide_console()
    for line in head(state):
        screen.print(line, markup=False)
    screen.print(tree_of(state))


@app.command()
def cancel(session: SessionArgument, url: UrlOption = None, as_json: JsonOption = False) -> None:
    """End a session as failed; a turn under way is aborted."""
    with connect(url) as client:
        ended = client.sessions.cancel(session)
    if as_json:
        emit(ended)
    else:
        print(f"{ended.session}  {ended.outcome}  {ended.turns} turns")


def head(state: SessionState) -> list[str]:
    """What holds for the whole session."""
    reward = "" if state.outcome is None or state.outcome.reward is None else f"  reward {state.outcome.reward:g}"
    at = "" if state.worker is None else f"  at {state.worker}"
    return [
        f"session   {state.session}  {state.status}{reward}{at}",
        f"group     {state.group_id}  sample {state.index} of {state.n}  run {state.run}",
        f"policy    {state.policy}  weights {state.hold}  history {state.reasoning_history}",
        f"          {state.turns} turns, {state.tokens} tokens, {len(state.leaves)} leaves, depth {state.depth}",
    ]


def tree_of(state: SessionState) -> Tree:
    from rich.text import Text
    from rich.tree import Tree

    nodes = {node.turn: node for node in state.nodes}
    children: defaultdict[int | None, list[int]] = defaultdict(list)
    for node in state.nodes:
        children[node.parent].append(node.turn)
    reasons = {branch.branch: branch.reason.value for branch in state.branches if branch.reason is not None}
    root = Tree("", hide_root=True)
    chains: list[tuple[Tree, int | None]] = [(root, turn) for turn in children[None]]
    for place, turn in chains:  # grows while it is walked: forks come behind
        while turn is not None:
            shown = place.add(Text(line_of(nodes[turn], apart(nodes, turn, reasons))))
            chains += [(shown, fork) for fork in children[turn][1:]]
            turn = next(iter(children[turn]), None)
    for uncounted in (*state.open_turns, *state.lost_turns):
        detail = f"  {uncounted.detail}" if uncounted.detail else ""
        root.add(Text(f"{uncounted.turn}  {uncounted.status}  {uncounted.branch}{detail}", style="dim"))
    return root


def apart(nodes: dict[int, NodeState], turn: int, reasons: dict[str, str]) -> str:
    """Why a turn does not simply go on behind its parent; empty where it does."""
    node = nodes[turn]
    if node.fork is not None:
        return f"  [{node.fork.value}]"
    before = MAIN_BRANCH if node.parent is None else nodes[node.parent].branch
    return "" if before == node.branch else f"  [{node.branch}: {reasons.get(node.branch, 'fork')}]"


def line_of(node: NodeState, why: str) -> str:
    """turn, why it stands apart, what was added and sampled, and the beginning of the text."""
    versions = ",".join(dict.fromkeys(f"v{span.version}" for span in node.weight_versions))
    calls = [f"{call.name}({call.arguments})" for call in node.tool_calls]
    text = " ".join([json.dumps(node.content, ensure_ascii=False)] * bool(node.content) + calls)
    if len(text) > TEXT_WIDTH:
        text = text[: TEXT_WIDTH - 1] + "…"
    added = "+".join(node.roles) or "ids"
    sizes = f"{node.observation_tokens}+{node.tokens} tokens"
    return f"{node.turn}{why}  {added}  {sizes}  {node.finish_reason or '-'}  {versions}  {text}".rstrip()
