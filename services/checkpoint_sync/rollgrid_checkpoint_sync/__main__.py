"""`python -m rollgrid_checkpoint_sync`."""

from __future__ import annotations

import sys

from rollgrid_runtime.imports import nothing_collected


def main() -> int:
    with nothing_collected():
        from rollgrid_runtime.service import run_service

        from .service import CheckpointSyncService
        from .settings import CheckpointSyncSettings

    settings = CheckpointSyncSettings()
    return run_service(CheckpointSyncService(settings), settings)


if __name__ == "__main__":
    sys.exit(main())
