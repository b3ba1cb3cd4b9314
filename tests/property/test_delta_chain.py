"""Chains of deltas: the cheapest way is found, and every chain that cannot be right is refused by its name (A43)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollgrid_contracts.checkpoints import CheckpointKind, CheckpointManifest, DeltaInfo, FileInfo
from rollgrid_contracts.failures import ErrorCode
from rollgrid_weights.delta.chain import MAX_LINKS, AnchorRule, Chain, Link, Why, anchor_due, link_of, resolve
from rollgrid_weights.errors import WeightsError


def full(version: int, size: int = 1000) -> Link:
    return Link(version, None, f"d{version}", "", size)


def delta(version: int, base: int | None = None, size: int = 10) -> Link:
    base = version - 1 if base is None else base
    return Link(version, base, f"d{version}", f"d{base}" if base else "", size)


def refused(links: list[Link], version: int) -> tuple[ErrorCode, str | None]:
    with pytest.raises(WeightsError) as caught:
        resolve(links, version)
    return caught.value.code, caught.value.field


LONG = [full(1), *(delta(version) for version in range(2, 32))]


def test_A43_an_anchor_and_thirty_deltas_in_order() -> None:
    chain = resolve(reversed(LONG), 31)
    assert chain == Chain(1, tuple(LONG[1:]), 1300)
    assert resolve(LONG, 1) == Chain(1, (), 1000)
    assert resolve(LONG, 31, at_hand={29: "d29"}) == Chain(29, tuple(LONG[29:]), 20)
    assert resolve(LONG, 31, at_hand={31: ""}) == Chain(31, (), 0)
    assert resolve([], 0) == Chain(0, (), 0)
    assert resolve([delta(1, 0)], 1) == Chain(0, (delta(1, 0),), 10)


def test_A43_a_merged_delta_serves_the_laggard_and_the_joiner() -> None:
    merged = delta(31, 1, 120)
    assert resolve([*LONG, merged], 31).links == (merged,)
    assert resolve([*LONG, merged], 31, at_hand={30: ""}).links == (LONG[-1],)
    assert resolve([*LONG, full(31, 200)], 31) == Chain(31, (), 200)


@pytest.mark.parametrize(
    ("links", "code", "field"),
    [
        (LONG[:5] + LONG[6:], ErrorCode.VERSION_UNAVAILABLE, "base_version"),  # a gap
        (LONG[4:], ErrorCode.VERSION_GONE, "base_version"),  # pruned at its beginning
        (LONG[:-1], ErrorCode.VERSION_UNAVAILABLE, "version"),
        ([*LONG[:-1], delta(31, 31)], ErrorCode.INVALID_REQUEST, "base_version"),  # against itself
        ([delta(30, 31), delta(31, 30)], ErrorCode.INVALID_REQUEST, "base_version"),  # a cycle
        ([*LONG[:-1], delta(31, -1)], ErrorCode.INVALID_REQUEST, "base_version"),
        ([*LONG[:-1], Link(31, 30, "d31", "other", 1)], ErrorCode.INVALID_REQUEST, "base_digest"),  # wrong base
        ([full(1), *(delta(version) for version in range(2, MAX_LINKS + 9)), delta(31)], None, None),
    ],
)
def test_A43_what_cannot_be_right_is_refused_by_name(
    links: list[Link], code: ErrorCode | None, field: str | None
) -> None:
    if code is None:
        assert refused(links, MAX_LINKS + 8) == (ErrorCode.LIMIT_EXCEEDED, "version")
    else:
        assert refused(links, 31) == (code, field)


def test_A43_a_wrong_link_does_not_hide_a_right_one() -> None:
    wrong = Link(31, 1, "d31", "other", 1)
    assert resolve([*LONG, wrong], 31) == resolve(LONG, 31)


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[Link], dict[int, str], int]:
    last = draw(st.integers(1, 7))
    links = []
    for version in range(1, last + 1):
        for _ in range(draw(st.integers(0, 2))):
            base = draw(st.none() | st.integers(-1, version + 1))
            links.append(Link(version, base, "", "", draw(st.integers(0, 50))))
    held = draw(st.sets(st.integers(1, last), max_size=2))
    return links, dict.fromkeys(held, ""), last


def cheapest(links: list[Link], held: dict[int, str], version: int) -> int | None:
    """By trying every way."""
    found = [0] if version in held or version == 0 else []
    for link in links:
        if link.version == version and link.base_version is None:
            found.append(link.bytes)
        elif link.version == version and link.base_version is not None and 0 <= link.base_version < version:
            below = cheapest(links, held, link.base_version)
            found += [] if below is None else [below + link.bytes]
    return min(found, default=None)


@given(histories())
def test_no_way_is_cheaper_and_every_way_holds_together(history: tuple[list[Link], dict[int, str], int]) -> None:
    links, held, version = history
    wanted = cheapest(links, held, version)
    if wanted is None:
        with pytest.raises(WeightsError):
            resolve(links, version, at_hand=held)
        return
    chain = resolve(links, version, at_hand=held)
    assert chain.bytes == wanted
    at = chain.start
    for link in chain.links:
        assert link.base_version == at
        at = link.version
    assert at == version


def test_links_of_manifests() -> None:
    files = (FileInfo(name="a.rgdelta", size=7, sha256=""), FileInfo(name="b.rgdelta", size=4, sha256=""))
    made = CheckpointManifest(
        tenant="t",
        policy="p",
        version=4,
        kind=CheckpointKind.DELTA,
        base_version=3,
        files=files,
        weights_digest="new",
        delta=DeltaInfo(codec="exponent", base_digest="old", target_digest="new"),
    )
    assert link_of(made) == Link(4, 3, "new", "old", 11)
    whole = CheckpointManifest(tenant="t", policy="p", version=4, kind=CheckpointKind.FULL, base_version=0, files=files)
    assert link_of(whole) == Link(4, None, "", "", 11)
    with pytest.raises(WeightsError):
        link_of(CheckpointManifest(tenant="t", policy="p", version=4, kind=CheckpointKind.LORA, files=files))


def test_A43_auto_sets_an_anchor_when_chain_or_blob_has_grown() -> None:
    rule = AnchorRule(every=3, chain_share=0.5, blob_share=0.2)
    assert anchor_due(None, 1000, 1, rule) is Why.FIRST
    assert anchor_due(Chain(1, (), 1000), 1000, 200, rule) is None
    assert anchor_due(Chain(1, (), 1000), 1000, 201, rule) is Why.BLOB
    two = Chain(1, (delta(2, 1, 200), delta(3, 2, 150)), 1350)
    assert anchor_due(two, 1000, 150, rule) is None
    assert anchor_due(two, 1000, 151, rule) is Why.CHAIN
    assert anchor_due(Chain(1, (*two.links, delta(4, 3, 1)), 0), 1000, 1, rule) is Why.EVERY
