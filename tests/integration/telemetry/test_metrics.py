"""docs/reference/metrics.md and what a running fleet exports are the same list."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families
from rollgrid import Client

from tests.integration.telemetry.test_traces import submit
from tests.support.stack import Stack
from tests.support.waiting import wait_until

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "metrics.md"
OWN_LABELS = {"le"}
UNITS = {"_seconds": "s", "_bytes": "B", "_bytes_total": "B"}


class Metric(NamedTuple):
    kind: str
    labels: frozenset[str]


def documented() -> dict[str, Metric]:
    found: dict[str, Metric] = {}
    for line in PAGE.read_text().splitlines():
        if not line.startswith("| `rollgrid_"):
            continue
        cells = [cell.strip() for cell in line.removeprefix("|").removesuffix("|").split("|")]
        quoted, kind, labels, unit, meaning, _alarm = cells
        name = quoted.strip("`")
        assert name not in found, f"{name} is there twice"
        assert meaning, line
        assert unit == next((unit for ending, unit in UNITS.items() if name.endswith(ending)), ""), line
        found[name] = Metric(kind, frozenset(filter(None, labels.split(", "))))
    return found


def exported(pipe: Stack) -> tuple[dict[str, str], dict[str, set[str]]]:
    """Kinds by name, and the labels that samples really had."""
    kinds: dict[str, str] = {}
    labels: dict[str, set[str]] = {}
    for process in pipe.services.values():
        for family in text_string_to_metric_families(process.metrics()):
            if not family.name.startswith("rollgrid_"):
                continue
            name = f"{family.name}_total" if family.type == "counter" else family.name
            kinds[name] = family.type
            seen = labels.setdefault(name, set())
            for sample in family.samples:
                seen |= sample.labels.keys() - OWN_LABELS
    return kinds, labels


def test_every_metric_is_documented_and_every_documented_one_is_exported(pipe: Stack, client: Client) -> None:
    batch = submit(pipe, trace="f" * 32, run="metered")
    list(client.batch(batch["batch_id"]).groups(timeout=60))
    wait_until(
        lambda: "rollgrid_queue_pending_messages{" in pipe["trajectory_logger"].metrics(), 30, "queues were read"
    )
    page = documented()
    kinds, labels = exported(pipe)
    assert sorted(kinds.keys() - page.keys()) == [], "not in docs/reference/metrics.md"
    assert sorted(page.keys() - kinds.keys()) == [], "documented, and exported by nobody"
    assert {name: kind for name, kind in kinds.items() if page[name].kind != kind} == {}
    assert {name: seen for name, seen in labels.items() if seen and seen != page[name].labels} == {}


def value(text: str, name: str, **labels: str) -> float:
    """The sum of a metric's samples with these labels."""
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


def test_one_scored_batch_counts_once_at_every_step(pipe: Stack, client: Client) -> None:
    names = ("rollgrid_sampler_tokens_total", "rollgrid_scorer_scores_total", "rollgrid_ledger_useful_samples_total",
             "rollgrid_ledger_queue_lag_seconds_count", "rollgrid_ingest_samples_total", "rollgrid_archive_groups_total",
             "rollgrid_sampler_samples_total", "rollgrid_ledger_rewards_total")  # fmt: skip

    def counts() -> dict[str, float]:
        text = [process.metrics() for process in pipe.services.values()]
        return {name: sum(value(one, name) for one in text) for name in names}

    logger = pipe["trajectory_logger"]
    wait_until(lambda: value(logger.metrics(), "rollgrid_archive_lag") == 0, 30, "earlier groups are archived", 0.2)
    before = counts()
    batch = client.submit([{"prompt": f"task {i}", "task": {"answer": "x"}} for i in range(3)], n=4, policy="tiny",
                          sampling={"max_tokens": 5}, scorers=["exact_match"], run="counted")  # fmt: skip
    assert [group.counts for group in batch.groups(timeout=60)] == [{"succeeded": 4}] * 3
    wanted = dict(zip(names, (60, 12, 12, 3, 12, 3, 12, 12), strict=True))
    gained: dict[str, float] = {}

    def all_there() -> bool:
        gained.update({name: after - before[name] for name, after in counts().items()})
        return all(gained[name] >= wanted[name] for name in names)

    wait_until(all_there, 30, "every step has counted", every_s=0.2)
    assert gained == wanted


def test_every_process_shows_its_memory_and_its_loop(pipe: Stack) -> None:
    for name, process in pipe.services.items():
        text = process.metrics()
        assert value(text, "process_resident_memory_bytes") > 10e6, name
        assert value(text, "rollgrid_process_loop_lag_seconds_count") > 0, name
        assert value(text, "rollgrid_bus_durable_writes_total") > 0 or name in ("scorer", "checkpoint_sync"), name
        assert "_created" not in text


def test_no_label_names_a_run_or_a_group(pipe: Stack, client: Client) -> None:
    run = "label-hunt-7421"
    batch = submit(pipe, trace=None, run=run)
    list(client.batch(batch["batch_id"]).groups(timeout=60))
    for name, process in pipe.services.items():
        text = process.metrics()
        assert run not in text, name
        assert batch["group_ids"][0] not in text, name
