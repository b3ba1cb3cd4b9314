"""`python -m examples.own_trainer`: warm start, the loop on a fleet, a picture and the figures.

Starts a rollgrid of its own unless $ROLLGRID_URL names one that was started on such a model.
Exits non-zero unless the held-out reward has risen by MARGIN.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from rollgrid import Client

from . import checkpoint
from .fleet import Fleet, own_stack
from .history import History
from .model import new_policy, warm_start
from .plots import draw
from .settings import Settings, add_options, from_options
from .tasks import TaskStream
from .trainer import Trainer

MARGIN = 0.3
STATE = "state"


def main() -> None:
    options = arguments()
    settings, out = from_options(options), options.out
    if options.resume:
        settings = Settings.read(out / STATE / checkpoint.SETTINGS)
    out.mkdir(parents=True, exist_ok=True)
    history = run(settings, out, resume=options.resume, name=options.run)
    (out / "train.json").write_text(json.dumps(history.to_dict(), indent=1))
    draw({settings.loss: [history]}, out / "train.png", f"own trainer, {settings.loss}, seed {settings.seed}")
    print(json.dumps(history.summary(), indent=1))
    print(
        f"held-out reward {history.exams[0].reward:.3f} -> {history.exams[-1].reward:.3f}; {out}/train.png, train.json"
    )
    raise SystemExit(history.rise < MARGIN)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="own_trainer", description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, default=Path("own-trainer"), help="folder of picture, figures and state")
    parser.add_argument("--run", default="own-trainer", help="the run's name in rollgrid")
    parser.add_argument("--resume", action="store_true", help="go on from the state in --out, with its settings")
    add_options(parser)
    return parser.parse_args()


def run(settings: Settings, out: Path, *, resume: bool, name: str) -> History:
    """Everything from the warm start to the last examination."""
    torch.set_num_threads(settings.threads)
    began = time.monotonic()
    policy = new_policy(settings.seed, settings.hidden, settings.layers)
    optimizer = warm_start(policy, TaskStream(settings.seed), until=settings.warm_until, lr=settings.warm_lr)
    print(f"{policy.parameters:,} parameters, warm start in {time.monotonic() - began:.0f} s")
    with tempfile.TemporaryDirectory(prefix="rollgrid-base-") as base:
        policy.save(Path(base))
        with client(Path(base)) as (rollgrid, served):
            fleet = Fleet(rollgrid, served, name, wait_live=settings.max_staleness == 0, publish_as=settings.publish)
            trainer = (
                checkpoint.resume(out / STATE, policy, optimizer, fleet)
                if resume
                else Trainer(settings, policy, optimizer, fleet)
            )
            history = trainer.train(tell=print, save=lambda: checkpoint.save(trainer, out / STATE))
    print(f"{time.monotonic() - began:.0f} s with the warm start and the stack's own")
    return history


@contextlib.contextmanager
def client(base: Path) -> Iterator[tuple[Client, str]]:
    """The fleet that $ROLLGRID_URL names and the policy it serves, else one of its own on the model in `base`."""
    if "ROLLGRID_URL" in os.environ:
        with Client() as found:
            yield found, found.policies()[0].policy
        return
    with own_stack(base) as stack:
        yield stack.client, stack.policy


if __name__ == "__main__":
    main()
