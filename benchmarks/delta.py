"""What a weight update weighs: bytes of every way to send one, and what ours costs, on real AdamW steps.

    python -m benchmarks.delta [--rates 1e-6,3e-6,1e-5] [--steps 30] [--measured 12] [--cold]

SmolLM2-135M in bfloat16 with float32 masters that have settled inside their rounding cells (`--cold`: that
begin on the grid, as in the first steps from a checkpoint).  Every step is encoded and applied to a copy of
the weights before the first; the copy must equal the trainer's weights in the end, byte for byte.  The step
`--measured` is encoded in every way.  Seconds are CPU seconds of one thread, the best of three.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import zstandard
from rollgrid_weights.delta import gaps
from rollgrid_weights.delta.blob import read_blob
from rollgrid_weights.delta.decode import apply_delta
from rollgrid_weights.delta.encode import encode_delta
from rollgrid_weights.delta.states import State, TensorBits, state_digest

from benchmarks.report import Budget, Result, print_result, save
from tests.support.trained_states import adamw_states

Flat = np.ndarray[tuple[int], np.dtype[np.uint16]]
RANK = 16
BUDGETS = (
    Budget("gap_value_over_ours_ratio", at_least=2.5),
    Budget("of_the_bound_ratio", at_least=0.9),
    Budget("encode_s", at_most=0.5),
    Budget("apply_s", at_most=0.5),
)


def adapter_bytes(shapes: list[tuple[int, ...]]) -> int:
    """Of a rank-16 LoRA in 16 bits on every linear layer; the largest matrix is the embedding."""
    matrices = sorted((shape for shape in shapes if len(shape) == 2), key=lambda shape: shape[0] * shape[1])
    return sum(2 * RANK * (rows + columns) for rows, columns in matrices[:-1])


def entropy(counts: np.ndarray[Any, Any]) -> float:
    """Bits in all, of a column of counts."""
    found = counts[counts > 0].astype(float)
    return float(-(found * np.log2(found / found.sum())).sum())


def bound_bytes(base: Flat, new: Flat) -> float:
    """H(changed | exponent) + H(step | exponent), of the empirical frequencies, without any table that says them."""
    changed = np.flatnonzero(base != new)
    exponents = (base >> 7) & 255
    there, moved = np.bincount(exponents, minlength=256), np.bincount(exponents[changed], minlength=256)
    bits = sum(entropy(np.array([all_ - some, some])) for all_, some in zip(there, moved, strict=True))
    steps = new[changed].astype(np.int64) - base[changed]
    for exponent in np.flatnonzero(moved):
        of_it = steps[exponents[changed] == exponent]
        bits += entropy(np.unique(of_it, return_counts=True)[1])
    return bits / 8


def other_ways(base: Flat, new: Flat) -> dict[str, float]:
    """Bytes of the other codecs, each over the whole model at once: what favours them."""
    packer = zstandard.ZstdCompressor(level=1)
    changed = np.flatnonzero(base != new)
    index_value = changed.astype("<i4").tobytes() + new[changed].tobytes()
    return {
        "full": base.nbytes,
        "xor_zstd": len(packer.compress((base ^ new).tobytes())),
        "index_value": len(index_value),
        "index_value_zstd": len(packer.compress(index_value)),
        "gap_value_zstd": len(gaps.encode_segment(changed, new[changed])),
    }


def best(work: Callable[[], Any]) -> float:
    taken = []
    for _ in range(3):
        began = time.process_time()
        work()
        taken.append(time.process_time() - began)
    return min(taken)


def measure_step(base: State, new: State) -> dict[str, float]:
    """Every figure of one step."""
    flat = [np.concatenate([state[name].bits for name in sorted(state)]) for state in (base, new)]
    sizes = other_ways(*flat)
    sizes["lora"] = adapter_bytes([tensor.shape for tensor in base.values()])
    sizes["bound"] = bound_bytes(*flat)
    blob = encode_delta(base, new)
    sizes["ours"] = len(blob)
    into = {name: tensor._replace(bits=tensor.bits.copy()) for name, tensor in base.items()}
    delta = read_blob(blob)
    header = delta.header

    def encode() -> bytes:
        return encode_delta(base, new, base_digest=header.base_digest, target_digest=header.target_digest)

    with ThreadPoolExecutor(1) as pool:
        seconds = {
            "encode_s": best(encode),
            "apply_s": best(lambda: apply_delta(read_blob(blob), base, into)),
            "digest_s": best(lambda: state_digest(into, pool)),
        }
    figures: dict[str, float] = {"changed_percent": 100 * delta.changed / delta.elements}
    figures |= {f"{name}_bytes": size for name, size in sizes.items()}
    figures |= {f"{name}_ratio": sizes["full"] / size for name, size in sizes.items() if name != "full"}
    figures["gap_value_over_ours_ratio"] = sizes["gap_value_zstd"] / sizes["ours"]
    figures["of_the_bound_ratio"] = sizes["bound"] / sizes["ours"]
    return figures | seconds


def snapshot(bits: dict[str, np.ndarray[Any, Any]]) -> dict[str, TensorBits]:
    return {name: TensorBits("BF16", found.shape, found.reshape(-1).copy()) for name, found in bits.items()}


def measure(folder: Path, rate: float, steps: int, measured: int, settled: bool, threads: int) -> Result:
    states = adamw_states(folder, [rate] * steps, settled=settled, sample_every=4, threads=threads)
    before = snapshot(next(states))
    rebuilt = {name: tensor._replace(bits=tensor.bits.copy()) for name, tensor in before.items()}
    figures, sizes = dict[str, float](), list[int]()
    for number, bits in enumerate(states, 1):
        now = snapshot(bits)
        blob = encode_delta(before, now, base_digest="-", target_digest="-")
        apply_delta(read_blob(blob), rebuilt, rebuilt)
        sizes.append(len(blob))
        if number == min(measured, steps):
            figures = measure_step(before, now)
        before = now
    wrong = [name for name, tensor in before.items() if rebuilt[name].bits.tobytes() != tensor.bits.tobytes()]
    if wrong:
        raise SystemExit(f"rebuilt from {steps} deltas, {wrong[0]} is not the trainer's")
    figures["chain_bytes"] = sum(sizes)
    figures["later_mean_ratio"] = figures["full_bytes"] * len(sizes[measured:]) / max(sum(sizes[measured:]), 1)
    figures["load_average"] = os.getloadavg()[0]
    setting = {"model": folder.name, "lr": rate, "steps": steps, "measured": measured, "settled": settled}
    return Result("weight deltas", setting, figures, BUDGETS)


def main(argv: list[str] | None = None) -> None:
    from rollgrid.models.prepare import prepare

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", default="1e-6,3e-6,1e-5")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--measured", type=int, default=12)
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="of the training, not of the codecs")
    chosen = parser.parse_args(argv)
    folder = prepare("smollm2-135m").path
    for rate in chosen.rates.split(","):
        result = measure(folder, float(rate), chosen.steps, chosen.measured, not chosen.cold, chosen.threads)
        print_result(result)
        save(result)


if __name__ == "__main__":
    main()
