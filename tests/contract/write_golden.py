"""Writes the golden bytes that are missing: `python -m tests.contract.write_golden`.

It never overwrites: bytes that are out cannot be called back.  An example whose bytes changed on
purpose (a new schema version) gets a new name.
"""

from __future__ import annotations

from pathlib import Path

from rollgrid_contracts import codec

from tests.contract.messages import ALL

FOLDER = Path(__file__).parent / "golden"
LINE = 96


def to_hex(data: bytes) -> str:
    text = data.hex()
    return "\n".join(text[start : start + LINE] for start in range(0, len(text), LINE)) + "\n"


def from_hex(text: str) -> bytes:
    return bytes.fromhex("".join(text.split()))


def path_of(name: str) -> Path:
    return FOLDER / f"{name}.hex"


def write_missing() -> list[str]:
    written = []
    for name, message in ALL.items():
        path = path_of(name)
        if not path.exists():
            path.write_text(to_hex(codec.encode(message)))
            written.append(name)
    return written


if __name__ == "__main__":
    print("written:", ", ".join(write_missing()) or "nothing, all there")
