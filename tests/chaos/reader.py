"""A trainer's iterator as a process of its own, to be killed: `python -m tests.chaos.reader URL RUN JOURNAL`.

Its journal is its cursor: each group is written down as it comes, and a new process goes on behind
the last line.  So every group of the run must appear in the journal exactly once.
"""

from __future__ import annotations

import sys
from pathlib import Path

from rollgrid import Client

from .journal import Delivered, Journal, now, read


def main(url: str, run: str, path: Path) -> None:
    known = [line for line in read(path) if isinstance(line, Delivered)] if path.exists() else []
    if known:  # a line torn by the kill is rewritten, not appended to
        whole = path.read_bytes()
        path.write_bytes(whole[: whole.rfind(b"\n") + 1])
    journal = Journal(path)
    cursor = known[-1].cursor if known else 0
    with Client(url, api_key="") as client:
        for group in client.trajectories(run, cursor=cursor, timeout=3600):
            journal.write(Delivered(at=now(), reader=path.stem, run=run, cursor=group.cursor, group_id=group.id))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
