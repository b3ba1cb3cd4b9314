"""What a manifest becomes once its version is adopted: all that a worker needs to stage it."""

from __future__ import annotations

from rollgrid_contracts.checkpoints import AdoptedVersion, CheckpointKind, CheckpointManifest


def adopted_version(manifest: CheckpointManifest, root: str, weights_digest: str = "") -> AdoptedVersion:
    """`root` is where its files are unless the manifest says; `weights_digest` is what verification found."""
    return AdoptedVersion(
        version=manifest.version,
        kind=manifest.kind,
        prefix=(manifest.prefix or root).rstrip("/") + "/",
        base_version=0 if manifest.kind is CheckpointKind.FULL else manifest.base_version or 0,
        step=manifest.step,
        weights_digest=weights_digest or manifest.weights_digest,
        committed_at=manifest.created_at,
        bytes=sum(file.size for file in manifest.files),
    )
