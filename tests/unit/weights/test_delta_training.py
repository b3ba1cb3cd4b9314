"""A trainer's weights after real AdamW steps, rebuilt from an anchor and thirty deltas: byte for byte (A43, A51)."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from rollgrid_weights.delta.blob import Codec, read_blob
from rollgrid_weights.delta.encode import encode_delta
from rollgrid_weights.delta.merge import merge_deltas
from rollgrid_weights.delta.states import State, TensorBits, file_state, state_digest
from rollgrid_weights.errors import WeightsError
from rollgrid_weights.rebuilding import rebuild

from tests.support.delta_states import same
from tests.support.safetensors_files import entry, raw
from tests.support.tiny_models import TinyModel, tiny_model

pytest.importorskip("torch")
DELTAS = 30
NAMES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


class Run(NamedTuple):
    """What a trainer has published, and the weights that it ended with."""

    anchor: Path
    deltas: list[Path]
    digest: str
    last: State


def trained(model: Path, root: Path, rates: Sequence[float], dtype: str, codec: Codec, sample_every: int = 10) -> Run:
    from tests.support.trained_states import SMALL, adamw_states

    (root / "anchor").mkdir(parents=True)
    states = (
        snapshot(bits, NAMES[dtype])
        for bits in adamw_states(model, list(rates), dtype=dtype, sample_every=sample_every, batch=SMALL)
    )
    before, deltas = next(states), list[Path]()
    write(root / "anchor" / "model.safetensors", before)
    with ThreadPoolExecutor(1) as pool:
        digest = state_digest(before, pool)
        for number, now in enumerate(states):
            newer = state_digest(now, pool)
            path = root / f"{number}.rgdelta"
            path.write_bytes(encode_delta(before, now, base_digest=digest, target_digest=newer, codec=codec))
            deltas.append(path)
            before, digest = now, newer
    return Run(root / "anchor", deltas, digest, before)


def snapshot(bits: dict[str, np.ndarray], dtype: str) -> dict[str, TensorBits]:
    return {name: TensorBits(dtype, found.shape, found.reshape(-1).copy()) for name, found in bits.items()}


def write(path: Path, state: State) -> None:
    header, at = {}, 0
    for name, found in state.items():
        header[name] = entry(found.dtype, list(found.shape), at, at + found.bits.nbytes)
        at += found.bits.nbytes
    path.write_bytes(raw(header, b"".join(found.bits.tobytes() for found in state.values())))


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


@pytest.fixture(params=["float32", "float16", "bfloat16"], scope="module")
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    dtype = request.param
    root = tmp_path_factory.mktemp(dtype)
    codec = Codec.GAPS if dtype == "bfloat16" else Codec.EXPONENT
    return trained(tiny_model(TinyModel(dtype=dtype)), root, [1e-5] * DELTAS, dtype, codec)


def test_A43_thirty_deltas_lead_to_the_trainers_bytes(run: Run, tmp_path: Path) -> None:
    before = digests(run.anchor)
    rebuild(run.anchor, run.deltas, tmp_path, run.digest)
    assert same(file_state([tmp_path / "model.safetensors"]), run.last)
    assert digests(run.anchor) == before


def test_A43_one_merged_delta_leads_there_too_and_is_smaller(run: Run, tmp_path: Path) -> None:
    anchor = file_state([run.anchor / "model.safetensors"])
    merged = tmp_path / "merged.rgdelta"
    merged.write_bytes(merge_deltas(anchor, [read_blob(path.read_bytes()) for path in run.deltas]))
    rebuild(run.anchor, [merged], tmp_path, run.digest)
    assert same(file_state([tmp_path / "model.safetensors"]), run.last)
    assert merged.stat().st_size < sum(path.stat().st_size for path in run.deltas)


def test_A43_a_missing_or_damaged_delta_ends_the_rebuilding_and_the_base_stays(run: Run, tmp_path: Path) -> None:
    before = digests(run.anchor)
    torn = tmp_path / "torn.rgdelta"
    torn.write_bytes(run.deltas[17].read_bytes()[:-1])
    flipped = tmp_path / "flipped.rgdelta"
    data = bytearray(run.deltas[17].read_bytes())
    data[-3] ^= 1
    flipped.write_bytes(data)
    for number, wrong in enumerate(([], [torn], [flipped], [run.deltas[18]])):
        folder = tmp_path / str(number)
        folder.mkdir()
        with pytest.raises(WeightsError):
            rebuild(run.anchor, [*run.deltas[:17], *wrong, *run.deltas[18:]], folder, run.digest)
    assert digests(run.anchor) == before
    deltas = [read_blob(path.read_bytes()) for path in run.deltas]
    with pytest.raises(WeightsError) as caught:
        merge_deltas(file_state([run.anchor / "model.safetensors"]), [*deltas[:17], *deltas[18:]])
    assert caught.value.field == "base_digest"


def test_A43_a_chain_with_one_delta_twice(run: Run, tmp_path: Path) -> None:
    """Gaps and values overwrite again; the exponent codec finds that it is not its base, or the digest does."""
    first = read_blob(run.deltas[0].read_bytes())
    twice = [run.deltas[0], run.deltas[0]]
    if first.codec is Codec.GAPS:
        rebuild(run.anchor, twice, tmp_path, first.header.target_digest)
    else:
        with pytest.raises(WeightsError):
            rebuild(run.anchor, twice, tmp_path, first.header.target_digest)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_A51_smollm2_rebuilt_from_thirty_deltas_at_three_learning_rates(tmp_path: Path) -> None:
    """Ten steps at each; `make bench-delta` does thirty at each."""
    from rollgrid.models.prepare import prepare

    rates = [1e-6] * 10 + [3e-6] * 10 + [1e-5] * 10
    run = trained(prepare("smollm2-135m").path, tmp_path / "run", rates, "bfloat16", Codec.EXPONENT, sample_every=30)
    (tmp_path / "rebuilt").mkdir()
    rebuild(run.anchor, run.deltas, tmp_path / "rebuilt", run.digest, threads=2)
    assert same(file_state([tmp_path / "rebuilt" / "model.safetensors"]), run.last)
    assert sum(path.stat().st_size for path in run.deltas) < (run.anchor / "model.safetensors").stat().st_size / 3
