"""`rollgrid top` from what was read: speeds between readings, restarts, and what is missing."""

from __future__ import annotations

from typing import Any

import msgspec
from rich.console import Console
from rollgrid.answers import Fleet
from rollgrid.cli.fleet_reading import Reading, frame
from rollgrid.cli.fleet_view import draw
from rollgrid_contracts.fleet import LoadedVersion, WorkerState


def worker(renewed_at: float, tokens: int, samples: int, **changes: Any) -> WorkerState:
    state = WorkerState(
        worker="sampler-0", incarnation="i1", pool="p", engine="scripted", device="cpu", slots=8, busy=3,
        loaded=(LoadedVersion(policy="tiny", version=2),), renewed_at=renewed_at, tokens_total=tokens,
        samples_total=samples,
    )  # fmt: skip
    return msgspec.structs.replace(state, **changes)


def reading(at: float, *workers: WorkerState, **counters: float) -> Reading:
    samples = tuple(
        (name, {"status": "succeeded"} if "entries" in name else {}, value) for name, value in counters.items()
    )
    queues = {
        "RG_JOBS": {
            "messages": 5, "bytes": 512, "max_bytes": 1024,
            "consumers": {"ledger-3": {"pending": 1, "unacked": 4}, "pool_p_bulk_acme": {"pending": 7, "unacked": 0}},
        }
    }  # fmt: skip
    fleet = Fleet(workers=workers, queues=queues, ledger={"holder": "logger-1", "epoch": 3, "age_s": 0.5})
    return Reading(at=at, fleet=fleet, metrics={"trajectory-logger": samples} if samples else {})


def test_a_workers_speed_is_measured_between_two_leases_not_between_two_looks() -> None:
    history = [reading(100.0, worker(99.0, 0, 0)), reading(102.0, worker(99.0, 0, 0))]
    found = frame(reading(104.0, worker(103.0, 400, 8)), history)
    assert found["workers"][0]["tokens_per_s"] == 100
    assert found["workers"][0]["samples_per_s"] == found["samples"]["per_s"] == 2
    same = frame(reading(105.0, worker(103.0, 400, 8)), history)
    assert same["workers"][0]["tokens_per_s"] == 100  # no lease since: what is known stands


def test_a_restarted_process_has_no_speed_and_none_is_ever_negative() -> None:
    before = reading(100.0, worker(99.0, 5000, 50), rollgrid_ledger_entries_total=1000)
    found = frame(reading(104.0, worker(103.0, 10, 1, incarnation="i2"), rollgrid_ledger_entries_total=3), [before])
    assert found["workers"][0]["tokens_per_s"] is None
    assert found["samples"]["per_s"] == 0


def test_counts_come_from_metrics_where_they_are_and_from_queues_where_not() -> None:
    counters = {"rollgrid_ledger_entries_total": 20.0, "rollgrid_ledger_open_groups": 4.0}
    found = frame(reading(104.0, **counters), [reading(102.0, rollgrid_ledger_entries_total=10)])
    assert found["samples"]["per_s"] == 5
    assert found["samples"]["statuses"] == {"succeeded": 20}
    assert (found["ledger"]["open_groups"], found["ledger"]["open_jobs"], found["ledger"]["epoch"]) == (4, 5, 3)
    assert found["ledger"]["closes_per_s"] == 0  # nothing was closed yet, and the logger says other things
    assert found["scorer"]["held"] is None
    bare = frame(reading(104.0))
    assert bare["ledger"]["open_groups"] is None
    assert bare["samples"]["per_s"] is None
    assert bare["queues"][0]["full"] == 0.5


def test_states_of_workers() -> None:
    states = [
        frame(reading(104.0, worker(renewed_at, 0, 0, **changes)))["workers"][0]["state"]
        for renewed_at, changes in (
            (103.0, {}),
            (103.0, {"draining": True}),
            (103.0, {"quarantined": "bad"}),
            (90.0, {}),
        )
    ]
    assert states == ["ready", "draining", "quarantined", "late"]


def test_a_frame_is_drawn_whole_and_says_what_it_does_not_know() -> None:
    screen = Console(width=140, record=True)
    found = frame(reading(104.0, worker(103.0, 0, 0, quarantined="digest differs")))
    screen.print(draw(found, "http://door", away="connection refused"))
    text = screen.export_text()
    for word in ("sampler-0", "quarantined", "digest differs", "tiny@2", "RG_JOBS", "pool_p_bulk_acme", "50.0 %",
                 "the door is away: connection refused", "/metrics is reachable", "open 5 jobs"):  # fmt: skip
        assert word in text, text


def test_long_lists_of_lanes_are_cut() -> None:
    lanes = {f"pool_p_bulk_t{number}": {"pending": number, "unacked": 0} for number in range(30)}
    fleet = Fleet(queues={"RG_JOBS": {"messages": 1, "consumers": lanes}})
    screen = Console(width=140, record=True)
    screen.print(draw(frame(Reading(at=1.0, fleet=fleet)), "http://door"))
    text = screen.export_text()
    assert "pool_p_bulk_t29" in text
    assert "and 22 more" in text
    assert "pool_p_bulk_t3 " not in text
