"""Run as `python -I -S reaper.py`: ends what a supervisor leaves behind when it is killed.

stdin: `+SESSION SIGNAL` when a part was started, `-SESSION` when it is gone, `done` before a normal
end.  If stdin ends without `done`, every process of those sessions gets its part's signal, and
SIGKILL if it is still there after GRACE_S.
"""

import contextlib
import os
import sys
import time

GRACE_S = 8.0
SIGKILL = 9


def members(sessions: dict[int, int]) -> dict[int, int]:
    """Processes that belong to one of the sessions: pid → session."""
    found: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", errors="replace") as handle:
                fields = handle.read().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] != "Z" and int(fields[3]) in sessions:
            found[int(name)] = int(fields[3])
    return found


def main() -> None:
    """Follow stdin; act when it ends without `done`."""
    sessions: dict[int, int] = {}
    for line in sys.stdin:
        word = line.strip()
        if word == "done":
            return
        if word.startswith("+"):
            session, number = word[1:].split()
            sessions[int(session)] = int(number)
        elif word.startswith("-"):
            sessions.pop(int(word[1:]), None)
    deadline = time.monotonic() + GRACE_S
    signalled: set[int] = set()
    while left := members(sessions):
        for pid, session in left.items():
            late = time.monotonic() > deadline
            if late or pid not in signalled:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, SIGKILL if late else sessions[session])
                signalled.add(pid)
        time.sleep(0.05)


if __name__ == "__main__":
    main()
