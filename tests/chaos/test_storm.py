"""The kill storm.  `CHAOS_SEED` repeats one, `CHAOS_SECONDS` makes it longer; `make chaos` is the long form."""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

import pytest
from rollgrid_contracts.jobs import OnRefresh

from tests.support.stack import scripted, vllm
from tests.support.tiny_models import TinyModel

from .client import Load
from .storm import run_storm

LONG = os.environ.get("ROLLGRID_CHAOS") == "long"
SECONDS = float(os.environ.get("CHAOS_SECONDS", "300" if LONG else "45"))


KEEP = Path(os.environ["CHAOS_KEEP"]) if "CHAOS_KEEP" in os.environ else None
"""A folder that keeps journals and logs."""


def seed() -> int:
    chosen = int(os.environ.get("CHAOS_SEED") or random.SystemRandom().randrange(10**6))
    print(f"CHAOS_SEED={chosen} CHAOS_SECONDS={SECONDS:g}", file=sys.stderr)
    return chosen


@pytest.mark.chaos
@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 400)
def test_i1_i2_i3_i4_i5_i10_every_accepted_sample_ends_once_through_the_storm() -> None:
    """Sessions and single generations.  And I4: new weights come all the time, and no token is of others than its version says."""
    chosen = seed()
    plan = scripted(
        token_rate=100,
        samplers=2,
        loggers=2,
        ack_wait_s=2.0,
        folder=KEEP,
        env={
            "ROLLGRID_TRAJECTORY_LOGGER_ARCHIVE_AGE_S": "2",
            "ROLLGRID_SAMPLER_MAX_STARTS": "50",
            "ROLLGRID_SAMPLER_SWAP_MODE": list(OnRefresh)[chosen % 3].value,
        },
    )
    load = Load(
        samples=max(500, int(10 * SECONDS)),
        over_s=SECONDS,
        deadline_s=SECONDS + 90,
        episodes=max(20, int(0.5 * SECONDS)),
    )
    outcome = run_storm(plan, load, chosen, refresh_every_s=2.0)
    print(outcome.report())
    assert not outcome.violations, outcome.report()
    assert outcome.quiet_after_s < 60
    assert len(outcome.versions) >= 3, outcome.report()


@pytest.mark.chaos
@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.skipif(not LONG, reason="real engines take long to come back: only in `make chaos`")
@pytest.mark.timeout(1200)
def test_the_storm_over_real_engines() -> None:
    plan = vllm(
        samplers=2,
        loggers=2,
        model=TinyModel(context=2048),
        ack_wait_s=3.0,
        folder=KEEP,
        env={"ROLLGRID_TRAJECTORY_LOGGER_ARCHIVE_AGE_S": "2", "ROLLGRID_SAMPLER_MAX_STARTS": "50"},
    )
    # long outputs: a kill finds engines in the middle of generation
    load = Load(samples=100, over_s=240, deadline_s=600, max_tokens=1500, ignore_eos=True, workers=4)
    outcome = run_storm(plan, load, seed(), pause_s=(4.0, 10.0))
    print(outcome.report())
    assert not outcome.violations, outcome.report()
