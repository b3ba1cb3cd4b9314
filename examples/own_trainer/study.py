"""`python -m examples.own_trainer.study`: does it learn, is it as good as colocated, does it survive faults?

Three trainers with the same seeds, warm starts, tasks and settings: synchronous on the fleet, asynchronous on
the fleet, and synchronous with the engine inside the trainer (`baseline`).  Stated beforehand: the held-out reward
after the last step rises (one-sided t test, p < 0.05) by MARGIN or more, and fleet and baseline differ by less than
PARITY (two one-sided t tests over paired seeds, p < 0.05).  The first LOCKSTEP steps must give identical tokens.

`--faults` is another study: a sampler is killed every KILL_EVERY_S seconds, and once in each run broken weights are
published.  The reward must be equivalent to that of the undisturbed fleet within FAULT_PARITY.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .faults import BrokenPublisher, kill_samplers
from .fleet import Fleet, Sampler, own_stack
from .history import History
from .intervals import equivalence_of, mean_of, rise_of
from .model import Policy, new_policy, warm_start
from .plots import draw
from .settings import Settings
from .tasks import TaskStream
from .trainer import TOLERANCE, Trainer

SETTINGS = Settings(steps=40, exam_every=20, exam_tasks=512)
MARGIN, PARITY, FAULT_PARITY, LOCKSTEP = 0.2, 0.1, 0.1, 2
FLEET, ASYNCHRONOUS, COLOCATED, FAULTY = "fleet", "fleet, asynchronous", "colocated", "fleet with faults"
STALENESS, AHEAD = 2, 1
KILL_EVERY_S = 20.0
Runs = dict[str, list[History]]


class WarmStart(NamedTuple):
    """A model and its optimizer before the first rollout, kept so that every trainer begins with the same."""

    settings: Settings
    weights: dict[str, Any]
    moments: dict[str, Any]

    def again(self) -> tuple[Policy, Any]:
        policy = new_policy(self.settings.seed, self.settings.hidden, self.settings.layers)
        policy.model.load_state_dict(self.weights)
        optimizer = torch.optim.AdamW(policy.model.parameters(), weight_decay=0.0)
        optimizer.load_state_dict(copy.deepcopy(self.moments))  # else it would train on in the copy's tensors
        return policy, optimizer


def main() -> None:
    parser = argparse.ArgumentParser(prog="study")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=SETTINGS.steps)
    parser.add_argument("--faults", action="store_true")
    parser.add_argument(
        "--calm", type=Path, help="with --faults: undisturbed runs of the same seeds, as a study leaves them"
    )
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args()
    settings = dataclasses.replace(SETTINGS, steps=options.steps)
    torch.set_num_threads(settings.threads)
    load, began = os.getloadavg()[0], time.monotonic()
    starts = [warm(dataclasses.replace(settings, seed=seed)) for seed in range(options.seeds)]
    with tempfile.TemporaryDirectory(prefix="rollgrid-base-") as folder:
        starts[0].again()[0].save(Path(folder))
        calm = read_runs(options.calm, starts) if options.calm else None
        runs, verdict = faults(starts, Path(folder), calm) if options.faults else parity(starts, Path(folder))
    name = "own-trainer-faults" if options.faults else "own-trainer"
    verdict |= {
        "settings": dataclasses.asdict(settings),
        "seconds": time.monotonic() - began,
        "load_average_before": load,
        "cores": os.cpu_count(),
        "seeds": [start.settings.seed for start in starts],
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"{name}.json").write_text(json.dumps(verdict, indent=1) + "\n")
    curves = {arm: [run.to_dict() for run in found] for arm, found in runs.items()}
    (options.out / f"{name}-runs.json").write_text(json.dumps(curves))
    draw(runs, options.out / f"{name}.png", f"own trainer, {len(starts)} seeds")
    print(json.dumps(verdict, indent=1))
    raise SystemExit(not verdict["passed"])


def warm(settings: Settings) -> WarmStart:
    policy = new_policy(settings.seed, settings.hidden, settings.layers)
    optimizer = warm_start(policy, TaskStream(settings.seed), until=settings.warm_until, lr=settings.warm_lr)
    weights = {name: tensor.detach().clone() for name, tensor in policy.model.state_dict().items()}
    return WarmStart(settings, weights, optimizer.state_dict())


def train(start: WarmStart, sampler: Sampler, **changes: Any) -> History:
    settings = dataclasses.replace(start.settings, **changes)
    policy, optimizer = start.again()
    began = time.monotonic()
    history = Trainer(settings, policy, optimizer, sampler).train()
    first, last = history.exams[0].reward, history.exams[-1].reward
    print(f"seed {settings.seed}: held out {first:.3f} -> {last:.3f} in {time.monotonic() - began:.0f} s", flush=True)
    return history


def parity(starts: list[WarmStart], folder: Path) -> tuple[Runs, dict[str, Any]]:
    """All three trainers, one after the other; nothing else of ours runs beside the one that is measured."""
    runs: Runs = {FLEET: [], ASYNCHRONOUS: [], COLOCATED: []}
    with own_stack(folder) as stack:
        for start in starts:
            name = f"study-{start.settings.seed}"
            runs[FLEET].append(train(start, Fleet(stack.client, stack.policy, name)))
            fleet = Fleet(stack.client, stack.policy, f"{name}-async", wait_live=False)
            runs[ASYNCHRONOUS].append(train(start, fleet, max_staleness=STALENESS, ahead=AHEAD))
    from .baseline import Colocated

    engine = Colocated(folder)
    runs[COLOCATED] = [train(start, engine) for start in starts]
    engine.close()
    return runs, judge(runs)


def judge(runs: Runs) -> dict[str, Any]:
    rise = rise_of([run.rise for run in runs[FLEET]])
    alike = {arm: equivalence_of(_paired(runs[arm], runs[COLOCATED]), PARITY) for arm in (FLEET, ASYNCHRONOUS)}
    lockstep = [_lockstep(*pair) for pair in zip(runs[FLEET], runs[COLOCATED], strict=True)]
    difference = max(step.difference for arm in runs.values() for run in arm for step in run.steps)
    checks = {
        f"held-out reward rises by {MARGIN} or more, p < 0.05": rise.p < 0.05 and rise.interval.low >= MARGIN,
        f"fleet equals colocated within {PARITY}, p < 0.05": alike[FLEET].equivalent,
        f"asynchronous equals colocated within {PARITY}, p < 0.05": alike[ASYNCHRONOUS].equivalent,
        f"the first {LOCKSTEP} steps give identical tokens": min(lockstep) >= LOCKSTEP,
        f"|dlogprob| below {TOLERANCE} at every step": difference < TOLERANCE,
        f"staleness at most {STALENESS}": _stalest(runs[ASYNCHRONOUS]) <= STALENESS and _stalest(runs[FLEET]) == 0,
        "every sample useful": all(step.useful == step.samples for run in runs[FLEET] + runs[ASYNCHRONOUS] for step in run.steps),
    }  # fmt: skip
    return {
        "passed": all(checks.values()),
        "checks": checks,
        "held_out_before": mean_of([run.exams[0].reward for run in runs[FLEET]])._asdict(),
        "held_out_after": {arm: mean_of([run.exams[-1].reward for run in found])._asdict() for arm, found in runs.items()},
        "rise": {"p": rise.p, **rise.interval._asdict()},
        "difference_to_colocated": {
            arm: {"p": found.p, "margin": found.margin, **found.interval._asdict()} for arm, found in alike.items()
        },
        "identical_first_steps": lockstep,
        "max_dlogprob": difference,
        "tokens_per_s": {arm: mean_of([_tokens_per_s(run) for run in found])._asdict() for arm, found in runs.items()},
    }  # fmt: skip


def read_runs(path: Path, starts: list[WarmStart]) -> list[History]:
    """The undisturbed runs of an earlier study, which had the same settings and at least these seeds."""
    found = []
    for start, run in zip(starts, json.loads(path.read_text())[FLEET], strict=False):
        known = {name: run["settings"].get(name, value) for name, value in dataclasses.asdict(start.settings).items()}
        if Settings(**known) != start.settings:
            raise SystemExit(f"{path} is of other settings")
        found.append(History.from_dict(start.settings, run))
    return found


def faults(starts: list[WarmStart], folder: Path, calm: list[History] | None) -> tuple[Runs, dict[str, Any]]:
    """The synchronous trainer undisturbed, and with kills and one broken publication."""
    runs: Runs = {FLEET: list(calm or []), FAULTY: []}
    refusals: list[str] = []
    with own_stack(folder, samplers=2) as stack:
        for start in starts if calm is None else []:
            name = f"calm-{start.settings.seed}"
            runs[FLEET].append(train(start, Fleet(stack.client, stack.policy, name)))
        with kill_samplers(stack.home, KILL_EVERY_S) as kills:
            for start in starts:
                fleet = BrokenPublisher(stack, f"faulty-{start.settings.seed}", break_at=start.settings.steps // 2)
                runs[FAULTY].append(train(start, fleet))
                refusals += fleet.refusals
    alike = equivalence_of(_paired(runs[FAULTY], runs[FLEET]), FAULT_PARITY)
    difference = max(step.difference for arm in runs.values() for run in arm for step in run.steps)
    checks = {
        "every run reached its end": all(len(run.steps) == starts[0].settings.steps for run in runs[FAULTY]),
        "samplers were killed": len(kills) > 0,
        "each broken publication was refused with a reason": len(refusals) == len(starts),
        f"reward equals that of the undisturbed fleet within {FAULT_PARITY}, p < 0.05": alike.equivalent,
        f"|dlogprob| below {TOLERANCE} at every step": difference < TOLERANCE,
    }
    return runs, {
        "passed": all(checks.values()),
        "checks": checks,
        "held_out_after": {arm: mean_of([run.exams[-1].reward for run in found])._asdict() for arm, found in runs.items()},
        "difference": {"p": alike.p, "margin": alike.margin, **alike.interval._asdict()},
        "kills": len(kills),
        "refusals": refusals,
        "useful": {arm: [run.summary()["useful"] / run.summary()["samples"] for run in found] for arm, found in runs.items()},
        "longest_step_s": {arm: max(step.seconds for run in found for step in run.steps) for arm, found in runs.items()},
        "max_dlogprob": difference,
    }  # fmt: skip


def _paired(ours: list[History], theirs: list[History]) -> list[float]:
    return [a.exams[-1].reward - b.exams[-1].reward for a, b in zip(ours, theirs, strict=True)]


def _lockstep(ours: History, theirs: History) -> int:
    """How many steps from the first on sampled the very same tokens."""
    pairs = zip(ours.steps, theirs.steps, strict=True)
    return next((position for position, (a, b) in enumerate(pairs) if a.ids != b.ids), len(ours.steps))


def _stalest(runs: list[History]) -> int:
    return max(step.staleness_max for run in runs for step in run.steps)


def _tokens_per_s(run: History) -> float:
    return float(run.summary()["tokens_per_s"])


if __name__ == "__main__":
    main()
