"""The page "Connect your trainer": its program runs as it stands, on real vLLM, and learns (A21, A43)."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rollgrid.models.prepare import prepare

from tests.support.stack import POLICY, stack, vllm

PAGE = Path(__file__).parents[2] / "docs" / "connect-your-trainer.md"
LINE = re.compile(r"step (\d+)  reward ([\d.]+)  \|dlogprob\| ([\d.e+-]+)  next version (\d+)")
MOST_LINES = 39


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_program_of_the_page_learns(tmp_path: Path) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    assert len(program.splitlines()) <= MOST_LINES
    folder = str(prepare("tiny", verify=False, say=lambda _: None).path)
    served = {
        "ROLLGRID_SAMPLER_MODEL": folder,
        "ROLLGRID_CHECKPOINT_SYNC_MODELS": json.dumps([{"name": POLICY, "path": folder, "dtype": "float32"}]),
    }
    with stack(vllm(slots=32, env=served)) as pipe:
        done = subprocess.run(
            [sys.executable, "-c", program],
            cwd=tmp_path, capture_output=True, text=True, timeout=250,
            env={**os.environ, "ROLLGRID_URL": pipe.url, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    steps = [(int(s), float(r), float(d), int(v)) for s, r, d, v in LINE.findall(done.stdout)]
    assert [version for *_, version in steps] == list(range(1, len(steps) + 1)), done.stdout
    assert max(difference for _, _, difference, _ in steps) < 1e-4
    assert steps[-1][1] > steps[0][1] + 0.2, done.stdout
