"""Log lines are JSON, carry the ids of what is worked on, and libraries' lines have the same form."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from typing import Any

from rollgrid_runtime.logging import _IDS, bound

PROGRAM = """
import logging, warnings
from rollgrid_runtime.logging import bound, configure_logging, get_logger
configure_logging("sampler", {level!r}, "json", "sampler-0")
log = get_logger("here")
with bound(tenant="acme", run="r1", group=None, trace_id="abc"):
    with bound(group="g1"):
        log.info("inside", index=3)
        log.debug("detail")
        logging.getLogger("uvicorn.error").warning("a library's %s", "line")
        logging.getLogger("botocore.auth").debug("Authorization: AWS4 secret")
    log.warning("outer", tenant="own")
log.info("outside")
try:
    1 / 0
except ZeroDivisionError:
    log.exception("failed")
"""


def lines(level: str) -> list[dict[str, Any]]:
    done = subprocess.run([sys.executable, "-c", PROGRAM.format(level=level)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stderr.splitlines()]


def test_every_line_is_json_with_the_ids_bound_around_it() -> None:
    by_event = {line["event"]: line for line in lines("INFO")}
    ids = {"tenant": "acme", "run": "r1", "group": "g1", "trace_id": "abc"}
    assert by_event["inside"].items() >= {**ids, "index": 3, "service": "sampler", "instance": "sampler-0"}.items()
    assert by_event["a library's line"].items() >= {**ids, "level": "warning", "logger": "uvicorn.error"}.items()
    assert "group" not in by_event["outer"]
    assert by_event["outer"]["tenant"] == "own"  # what the line itself says stands
    assert not ids.keys() & by_event["outside"].keys()
    assert "ZeroDivisionError" in by_event["failed"]["exception"]
    assert "detail" not in by_event


def test_debug_is_ours_alone_because_libraries_show_secrets_there() -> None:
    events = [line["event"] for line in lines("DEBUG")]
    assert "detail" in events
    assert not [event for event in events if "secret" in event]


async def test_ids_stay_with_the_task_that_was_started_under_them() -> None:
    async def seen() -> dict[str, str]:
        await asyncio.sleep(0)
        return dict(_IDS.get())

    with bound(group="g1"):
        one = asyncio.create_task(seen())
    with bound(group="g2", run="r"):
        two = asyncio.create_task(seen())
    assert [*await asyncio.gather(one, two)] == [{"group": "g1"}, {"group": "g2", "run": "r"}]
    assert dict(_IDS.get()) == {}
