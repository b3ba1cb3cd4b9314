"""Which deltas lead to a version, and when to publish a full one instead.  Pure: no file is read here.

A version is reached from a state that is whole (a full version, or whatever is at hand) over deltas,
each against the version before it; there may be several ways, merged deltas among them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from enum import StrEnum
from typing import NamedTuple

from rollgrid_contracts.checkpoints import CheckpointKind, CheckpointManifest
from rollgrid_contracts.failures import ErrorCode

from rollgrid_weights.errors import WeightsError, invalid

MAX_LINKS = 1024
"""Deltas one after the other; whoever publishes sets an anchor long before."""


class Link(NamedTuple):
    """One way to one version: from `base_version`, or whole (None).  Digests are `weights_digest`s; "" = not known."""

    version: int
    base_version: int | None = None
    digest: str = ""
    base_digest: str = ""
    bytes: int = 0


class Chain(NamedTuple):
    """Begin with the whole version `start` and apply `links`, in order; `bytes` are those to fetch."""

    start: int
    links: tuple[Link, ...]
    bytes: int


def link_of(manifest: CheckpointManifest) -> Link:
    """Raises WeightsError for a LoRA version: it is no state of the weights."""
    if not manifest.kind.whole:
        raise invalid(f"version {manifest.version} is a {manifest.kind.value} version", "kind")
    base = (manifest.base_version or 0) if manifest.kind is CheckpointKind.DELTA else None
    size = sum(file.size for file in manifest.files)
    base_digest = manifest.delta.base_digest if manifest.delta else ""
    return Link(manifest.version, base, manifest.weights_digest, base_digest, size)


def resolve(links: Iterable[Link], version: int, *, at_hand: Mapping[int, str] | None = None) -> Chain:
    """The way to `version` that needs the fewest bytes.

    `at_hand` are versions that are whole where the chain will be applied, with their digests ("" = not
    known): they cost nothing.  The base (0) always is.

    Raises WeightsError: `version_unavailable` for a version that no link leads to and for a gap in the
    chain, `version_gone` for a base older than every version that is kept, `invalid_request` (field
    `base_version`) for a base that is not older than its delta, so for every cycle, and (field
    `base_digest`) for one made against another state, `limit_exceeded` for a chain that is too long.
    """
    ways: dict[int, list[Link]] = {}
    for link in links:
        ways.setdefault(link.version, []).append(link)
    held = {0: "", **(at_hand or {})}
    if version not in ways and version not in held:
        raise WeightsError(ErrorCode.VERSION_UNAVAILABLE, f"version {version} is not known", field="version")
    reached: dict[int, Chain] = {known: Chain(known, (), 0) for known in held}
    refused: dict[int, WeightsError] = {}
    digests = {known: {digest} if digest else set() for known, digest in held.items()}
    for one in sorted(ways):  # a base is older than its delta: those below are decided
        if one > version:
            break
        digests.setdefault(one, set()).update(link.digest for link in ways[one] if link.digest)
        for link in ways[one]:
            try:
                chain = _extended(link, reached, refused, digests, oldest=min(ways))
            except WeightsError as error:
                refused.setdefault(one, error)
                continue
            if one not in reached or chain.bytes < reached[one].bytes:
                reached[one] = chain
    if version not in reached:
        raise refused[version]
    return reached[version]


def _extended(
    link: Link,
    reached: Mapping[int, Chain],
    refused: Mapping[int, WeightsError],
    digests: Mapping[int, Collection[str]],
    *,
    oldest: int,
) -> Chain:
    """The chain to a link's base and the link.  Raises WeightsError as `resolve`."""
    base = link.base_version
    if base is None:
        return Chain(link.version, (), link.bytes)
    what = f"version {link.version} is a delta against version {base}"
    if base >= link.version or base < 0:
        raise invalid(f"{what}, which is not older", "base_version")
    if base not in reached:
        if base in refused:
            raise refused[base]
        gone = base < oldest
        code = ErrorCode.VERSION_GONE if gone else ErrorCode.VERSION_UNAVAILABLE
        raise WeightsError(
            code, f"{what}, which is {'not kept any more' if gone else 'not known'}", field="base_version"
        )
    if link.base_digest and digests[base] and link.base_digest not in digests[base]:
        raise invalid(f"{what} with digest {link.base_digest[:64]}, its own is {min(digests[base])}", "base_digest")
    before = reached[base]
    if len(before.links) >= MAX_LINKS:
        raise WeightsError(
            ErrorCode.LIMIT_EXCEEDED, f"{what} at the end of a long chain", field="version", limit=f"{MAX_LINKS} deltas"
        )
    return Chain(before.start, (*before.links, link), before.bytes + link.bytes)


class AnchorRule(NamedTuple):
    """When a full version is due: a joiner fetches one and all deltas since."""

    every: int = 32
    """Deltas in a row, at most."""
    chain_share: float = 0.5
    """Bytes of the deltas since the anchor, over those of a full version."""
    blob_share: float = 1 / 3
    """Bytes of one delta, over those of a full version."""


class Why(StrEnum):
    """Why a version is full: the word for logs, metrics and the publisher."""

    FIRST = "first"
    EVERY = "every"
    CHAIN = "chain"
    BLOB = "blob"


def anchor_due(
    since: Chain | None,
    full_bytes: int,
    blob_bytes: int = 0,
    rule: AnchorRule = AnchorRule(),  # noqa: B008
) -> Why | None:
    """Whether the version after `since` has to be full, and why; None = a delta of `blob_bytes` will do.

    `since` is the chain to the version that the delta would be made against, None when there is none.
    """
    if since is None:
        return Why.FIRST
    if len(since.links) >= rule.every:
        return Why.EVERY
    if blob_bytes > rule.blob_share * full_bytes:
        return Why.BLOB
    if sum(link.bytes for link in since.links) + blob_bytes > rule.chain_share * full_bytes:
        return Why.CHAIN
    return None
