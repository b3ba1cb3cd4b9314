"""`python -m examples.own_trainer`: warm start, a stack of its own, the loop, a picture and the figures."""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch

from .fleet import Fleet, own_stack
from .model import new_policy, warm_start
from .settings import add_options, from_options
from .tasks import TaskStream
from .trainer import Trainer


def main() -> None:
    parser = argparse.ArgumentParser(prog="own_trainer", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("own-trainer"), help="folder of the picture and the figures")
    add_options(parser)
    options = parser.parse_args()
    settings, out = from_options(options), options.out
    out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(settings.threads)
    began = time.monotonic()
    policy = new_policy(settings.seed, settings.hidden, settings.layers)
    optimizer = warm_start(policy, TaskStream(settings.seed), until=settings.warm_until, lr=settings.warm_lr)
    print(f"{policy.parameters:,} parameters; warm start in {time.monotonic() - began:.0f} s")
    with tempfile.TemporaryDirectory(prefix="rollgrid-base-") as base:
        policy.save(Path(base))
        with own_stack(Path(base)) as stack:
            fleet = Fleet(stack.client, stack.policy, "own-trainer", wait_live=settings.max_staleness == 0)
            history = Trainer(settings, policy, optimizer, fleet).train(tell=print)
    (out / "train.json").write_text(json.dumps(history.to_dict(), indent=1))
    print(json.dumps(history.summary(), indent=1))


if __name__ == "__main__":
    main()
