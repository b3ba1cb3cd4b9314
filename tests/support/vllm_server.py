"""A plain `vllm serve` on the CPU, as a test's process."""

from __future__ import annotations

import os
import sys
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from .processes import Process, free_port

READY_S = 200.0


class VllmServer(Process):
    """vLLM's own OpenAI server for the model in `model`, float32, logprobs as a trainer needs them."""

    def __init__(self, model: Path, folder: Path, names: Sequence[str], options: Sequence[str] = ()) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1"]
        command += ["--port", str(port), "--model", str(model), "--served-model-name", *names]
        command += ["--dtype", "float32", "--enforce-eager", "--kv-cache-memory-bytes", str(64 * 2**20)]
        command += ["--logprobs-mode", "processed_logprobs", "--generation-config", "vllm", *options]
        env = {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "TORCHDYNAMO_DISABLE": "1",  # else the first logprobs request compiles for 20 s
            "VLLM_LOGGING_LEVEL": "WARNING",
        }
        super().__init__("vllm-server", command, folder / "vllm.log", env)

    def is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False
