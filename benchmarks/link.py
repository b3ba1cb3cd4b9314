"""A slow link between the trainer and the fleet: publish to first new token for full, delta and LoRA, as ratios.

    python -m benchmarks.link [--model smollm2] [--mbit 100] [--publishes 3] [--lr 1e-6]

Both ways a version takes are throttled to so many Mbit/s: from the trainer to ingest, and from S3 to the sampler
(ingest, S3 and checkpoint-sync are in one place).  The weights are those after real AdamW steps; the adapter is of
rank 16 on the attention's projections.  Samples without a constraint are generated all the time.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rollgrid import Client

from benchmarks.engine_overhead import plan, subject
from benchmarks.refresh import LIVE_S, generate
from benchmarks.report import Result, print_result, save
from tests.support.stack import POLICY, Stack, stack
from tests.support.trained_states import adamw_states

SLOTS = 8
CHUNK = 16 * 1024
RANK = 16
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
LORA_CONFIG = {
    "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": RANK, "target_modules": list(PROJECTIONS),
}  # fmt: skip


class Link:
    """A TCP proxy on this machine that lets `bytes_per_s` pass each way, over all connections together."""

    def __init__(self, bytes_per_s: float) -> None:
        self.target = 0
        self.passed = 0
        self._bytes_per_s = bytes_per_s
        self._free_at = {"up": 0.0, "down": 0.0}
        self._loop = asyncio.new_event_loop()
        self._server = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.port: int = self._server.sockets[0].getsockname()[1]
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", self.target)
        try:
            await asyncio.gather(self._pump("up", reader, back), self._pump("down", there, writer))
        except OSError:
            pass
        finally:
            writer.close()
            back.close()

    async def _pump(self, way: str, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while data := await source.read(CHUNK):
            start = max(time.monotonic(), self._free_at[way])
            self._free_at[way] = start + len(data) / self._bytes_per_s
            self.passed += len(data)
            await asyncio.sleep(max(0.0, self._free_at[way] - time.monotonic()))
            sink.write(data)
            await sink.drain()
        if sink.can_write_eof():
            sink.write_eof()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)


def states(folder: Path, dtype: str, lr: float, count: int) -> Iterator[dict[str, Any]]:
    """The trainer's state dict before the first step and after each."""
    import torch

    kinds = {2: torch.bfloat16, 4: torch.float32}
    for found in adamw_states(folder, [lr] * count, dtype=dtype):
        yield {
            name: torch.from_numpy(bits.copy().view(f"i{bits.itemsize}")).view(kinds[bits.itemsize])
            for name, bits in found.items()
        }


def adapter(folder: Path, number: int) -> dict[str, Any]:
    """A PEFT state dict on every attention projection."""
    import torch
    from safetensors import safe_open

    generator, found = torch.Generator().manual_seed(number), dict[str, Any]()
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                module = name.removesuffix(".weight")
                if not module.endswith(PROJECTIONS):
                    continue
                rows, columns = file.get_slice(name).get_shape()
                where = f"base_model.model.{module}"
                found[f"{where}.lora_A.weight"] = 0.02 * torch.randn(RANK, columns, generator=generator)
                found[f"{where}.lora_B.weight"] = 0.02 * torch.randn(rows, RANK, generator=generator)
    return found


def publish_and_see(pipe: Stack, publisher: Client, tensors: dict[str, Any], **options: Any) -> tuple[float, int, int]:
    """Seconds from the call of `publish` to the first token that the version made; its number and bytes."""
    sizes: dict[str, int] = {}

    def publish() -> int:
        sent = lambda file, told, size: sizes.update({file: size})  # noqa: E731
        return int(publisher.weights.publish(POLICY, tensors, sent=sent, **options).wait_live(LIVE_S).version)

    with Client(pipe.url, api_key="") as client, ThreadPoolExecutor(1) as beside:
        began, seen = time.time(), list[tuple[int, float]]()
        publishing = beside.submit(publish)
        while not publishing.done():
            seen += generate(client, f"link-{began:.0f}")
        version = publishing.result()
        seen += generate(client, f"link-{began:.0f}-after")
    return min(at for made_by, at in seen if made_by == version) - began, version, sum(sizes.values())


def measure(model: str, mbit: float, publishes: int, lr: float) -> Result:
    chosen = subject(model)
    folder = Path(chosen.folder)
    to_ingest, to_s3 = Link(mbit * 1e6 / 8), Link(mbit * 1e6 / 8)
    made = plan(chosen, SLOTS)
    made = made._replace(
        env={**made.env, "ROLLGRID_SAMPLER_MAX_LORAS": "4"},
        service_env={"sampler-0": {"ROLLGRID_S3_ENDPOINT": to_s3.url}},
    )
    taken: dict[str, list[float]] = {"full": [], "delta": [], "lora": []}
    weight: dict[str, int] = {}
    steps = states(folder, chosen.dtype, lr, 2 * publishes + 1)
    with stack(made, start=False) as pipe:
        to_s3.target, to_ingest.target = pipe.weed.port, int(pipe.url.rpartition(":")[2])
        pipe.start()
        with Client(to_ingest.url, api_key="") as publisher:
            _, base, _ = publish_and_see(
                pipe, publisher, next(steps), kind="auto"
            )  # connections, and a base for deltas
            for _ in range(publishes):
                for kind in ("delta", "full"):
                    seconds, base, weight[kind] = publish_and_see(
                        pipe, publisher, next(steps), kind="auto" if kind == "full" else kind,
                        **({"anchor_every": 0} if kind == "full" else {}),
                    )  # fmt: skip
                    taken[kind].append(seconds)
            for number in range(publishes):
                seconds, _, weight["lora"] = publish_and_see(
                    pipe, publisher, adapter(folder, number), adapter_config=LORA_CONFIG, base_version=base
                )
                taken["lora"].append(seconds)
    for link in (to_ingest, to_s3):
        link.close()
    median = {kind: statistics.median(seconds) for kind, seconds in taken.items()}
    figures = {f"{kind}_to_first_token_s": found for kind, found in median.items()}
    figures |= {f"{kind}_bytes": float(found) for kind, found in weight.items()}
    figures |= {f"full_over_{kind}": median["full"] / median[kind] for kind in ("delta", "lora")}
    figures["load_average"] = os.getloadavg()[0]
    setting = {"model": model, "mbit": mbit, "publishes": publishes, "lr": lr}
    return Result("publish over a slow link", setting, figures, ())


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--mbit", type=float, default=100.0)
    parser.add_argument("--publishes", type=int, default=3)
    parser.add_argument("--lr", type=float, default=1e-6)
    chosen = parser.parse_args(argv)
    result = measure(chosen.model, chosen.mbit, chosen.publishes, chosen.lr)
    print_result(result)
    save(result)


if __name__ == "__main__":
    main()
