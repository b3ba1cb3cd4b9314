"""Nothing of a sampler outlives it: two seconds after SIGKILL its engine's processes are gone."""

from __future__ import annotations

import importlib.util
import os
import signal
import time

import pytest
from rollgrid.stack.processes import session_members

from tests.integration.stack.stack_process import stack
from tests.support.processes import free_port
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.timeout(600)]


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_a_killed_sampler_leaves_no_engine_and_its_work_is_finished_by_the_next() -> None:
    with stack(ROLLGRID_NATS_ACK_WAIT_S="5", ROLLGRID_SAMPLER_KV_CACHE_BYTES="67108864") as found:
        answer = found.run("up", "--model", "tiny", "--port", str(free_port()), "--detach", timeout_s=300)
        assert answer.returncode == 0, answer.stderr + found.logs()
        sampler = found.process("sampler-0")
        assert sampler is not None
        assert len(session_members(sampler.pid)) >= 3, "the sampler, its engine core, its worker"
        with found.client() as client:
            batch = client.submit(
                [f"task {i}" for i in range(8)], n=4, policy="tiny",
                sampling={"max_tokens": 256, "ignore_eos": True}, run="orphans",
            )  # fmt: skip
            os.kill(sampler.pid, signal.SIGKILL)
            time.sleep(2.0)  # the promise is about two seconds
            assert session_members(sampler.pid) == []
            wait_until(lambda: found.process("sampler-0") not in (None, sampler), 60, "the sampler runs again")
            groups = list(batch.groups(timeout=240))
        assert [group.counts for group in groups] == [{"succeeded": 4}] * 8
        assert found.down().returncode == 0
