"""A frame of `rollgrid top` as it is drawn on a terminal."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

MOST_LANES = 8
"""Consumers shown of one stream, the longest first."""
STATES = {"ready": "green", "draining": "yellow", "quarantined": "red", "late": "red"}


def draw(frame: dict[str, Any], url: str, away: str | None = None) -> Group:
    """`away` says why the numbers are old."""
    from rich.console import Group
    from rich.text import Text

    parts: list[Text | Table] = [_headline(frame, url, away)]
    parts += [_workers(frame["workers"]), Text(""), _queues(frame["queues"]), Text(""), *_lines(frame)]
    return Group(*parts)


def _headline(frame: dict[str, Any], url: str, away: str | None) -> Text:
    from rich.text import Text

    text = Text.assemble(("rollgrid top", "bold"), f"  {url}  {time.strftime('%H:%M:%S', time.localtime(frame['at']))}")
    if away is not None:
        text.append(f"\nthe door is away: {away}; the numbers are of before", style="bold red")
    samples = frame["samples"]
    text.append(f"\nsamples {number(samples['per_s'])}/s")
    text.append(f"   useful {number(samples['useful_per_s'])}/s")
    tokens = [worker["tokens_per_s"] for worker in frame["workers"] if worker["tokens_per_s"] is not None]
    text.append(f"   tokens {number(sum(tokens) if tokens else None)}/s   q quits\n", style="")
    return text


def _workers(workers: list[dict[str, Any]]) -> Table | Text:
    from rich.table import Table
    from rich.text import Text

    if not workers:
        return Text("no worker has a live lease", style="yellow")
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("worker", "state", "loaded", "engine"):
        table.add_column(heading, no_wrap=True)
    for heading in ("busy", "slots", "tokens/s", "samples/s", "samples"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("", overflow="fold")
    for row in workers:
        table.add_row(
            row["worker"],
            Text(row["state"], style=STATES[row["state"]]),
            ", ".join(row["loaded"]) or "nothing",
            row["engine"],
            str(row["busy"]),
            str(row["slots"]),
            number(row["tokens_per_s"]),
            number(row["samples_per_s"]),
            str(row["samples_total"]),
            row["problem"] or "",
        )
    return table


def _queues(queues: list[dict[str, Any]]) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("stream", "consumer"):
        table.add_column(heading, no_wrap=True)
    for heading in ("messages", "full", "waiting", "in hand"):
        table.add_column(heading, justify="right", no_wrap=True)
    for queue in queues:
        full = f"{100 * queue['full']:.1f} %" if queue["full"] is not None else ""
        table.add_row(queue["stream"], "", str(queue["messages"]), full, "", "")
        longest = sorted(queue["consumers"].items(), key=lambda item: -sum(item[1].values()))
        for name, lag in longest[:MOST_LANES]:
            table.add_row("", name, "", "", str(lag.get("pending", 0)), str(lag.get("unacked", 0)))
        if len(longest) > MOST_LANES:
            table.add_row("", f"and {len(longest) - MOST_LANES} more", "", "", "", "")
    return table


def _lines(frame: dict[str, Any]) -> list[Text]:
    from rich.text import Text

    ledger, scorer, ingest = frame["ledger"], frame["scorer"], frame["ingest"]
    held = ledger["open_groups"] if ledger["open_groups"] is not None else f"{ledger['open_jobs']} jobs"
    lines = [
        f"ledger   open {held}   closes {number(ledger['closes_per_s'])}/s   "
        f"epoch {ledger['epoch']} of {ledger['holder'] or 'nobody'}   archive behind {number(ledger['archive_lag'])}",
        f"samples  {counts(frame['samples']['statuses'])}   rewards {counts(frame['samples']['rewards'])}",
        f"scorer   {number(scorer['verdicts_per_s'])} verdicts/s   held {number(scorer['held'])}   "
        f"{counts(scorer['statuses'])}",
        f"ingest   {number(ingest['requests_per_s'])} requests/s   refused {number(ingest['refused_per_s'])}/s   "
        f"waiting {number(ingest['waiting'])}   streams {number(ingest['streams_open'])}",
    ]
    if frame["services"]:
        lines.append(
            "memory   "
            + "   ".join(f"{name} {facts['memory_bytes'] / 2**20:.0f} MiB" for name, facts in frame["services"].items())
        )
    else:
        lines.append(
            "no service's /metrics is reachable from here: speeds and counts come from leases and queues alone"
        )
    return [Text(line, no_wrap=True, overflow="ellipsis") for line in lines]


def number(value: float | None) -> str:
    """`-` for what is not known."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.2g}"


def counts(by_name: dict[str, float]) -> str:
    return " ".join(f"{name or '-'} {value:.0f}" for name, value in sorted(by_name.items()) if value) or "-"
