"""The published test vectors, read by the real reader and by one written from the page of the format alone."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rollgrid_weights.delta.blob import DIGEST_BYTES, FRONT, Codec, read_blob
from rollgrid_weights.delta.decode import apply_delta
from rollgrid_weights.delta.encode import encode_delta
from rollgrid_weights.delta.states import TensorBits, tensor_bits

from tests.support import delta_reference
from tests.support.delta_states import copied, same
from tests.unit.weights.write_delta_vectors import VECTORS

ALL = json.loads(VECTORS.read_text())
PAGE = Path(__file__).parents[3] / "docs" / "reference" / "delta-format.md"
every = pytest.mark.parametrize("vector", ALL, ids=[f"{vector['name']}, codec {vector['codec']}" for vector in ALL])


def side(vector: dict[str, Any], which: str) -> dict[str, TensorBits]:
    return {
        found["name"]: tensor_bits(found["name"], found["dtype"], found["shape"], unpacked(found[which]))
        for found in vector["tensors"]
    }


def unpacked(text: str) -> bytes:
    zeros, plus, rest = text.rpartition("+")
    return bytes(int(zeros.removeprefix("00*")) if plus else 0) + bytes.fromhex(rest)


@every
def test_A43_read(vector: dict[str, Any]) -> None:
    base, target = side(vector, "base"), side(vector, "target")
    delta = read_blob(bytes.fromhex(vector["delta"]))
    assert delta.codec is Codec(vector["codec"])
    built = copied(base)
    apply_delta(delta, base, built)
    assert same(built, target)


@every
def test_read_as_the_page_says(vector: dict[str, Any]) -> None:
    base = {name: tensor.bits.tolist() for name, tensor in side(vector, "base").items()}
    header, target = delta_reference.read(bytes.fromhex(vector["delta"]), base)
    assert target == {name: tensor.bits.tolist() for name, tensor in side(vector, "target").items()}
    assert sum(changed for _, _, _, changed in header["tensors"]) == sum(
        int(np.sum(old.bits != side(vector, "target")[name].bits)) for name, old in side(vector, "base").items()
    )


@every
def test_written_again_it_has_the_same_segments(vector: dict[str, Any]) -> None:
    """What zstd makes of header and tables may differ by its version; what the codecs say may not."""
    base, target = side(vector, "base"), side(vector, "target")
    made = encode_delta(base, target, codec=Codec(vector["codec"]), segment=vector["segment"])
    old, new = read_blob(bytes.fromhex(vector["delta"])), read_blob(made)
    assert (old.header.base_digest, old.header.target_digest) == (new.header.base_digest, new.header.target_digest)
    assert old.header.tensors == new.header.tensors
    if old.codec is Codec.EXPONENT:
        assert [group.segments for group in old.header.groups] == [group.segments for group in new.header.groups]


def test_the_page_holds_the_first_vector() -> None:
    """The worked example of the page is a vector, byte for byte."""
    texts = re.findall(r"```hex\n(.*?)```", PAGE.read_text(), re.DOTALL)
    blobs = {"".join(text.split()) for text in texts}
    assert {vector["delta"] for vector in ALL[:2]} == blobs
    assert all(bytes.fromhex(blob)[: FRONT.size + DIGEST_BYTES][:8] == b"rgdelta\n" for blob in blobs)
