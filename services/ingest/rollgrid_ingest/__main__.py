"""`python -m rollgrid_ingest`."""

from __future__ import annotations

import sys

from rollgrid_runtime.imports import nothing_collected


def main() -> int:
    with nothing_collected():
        from rollgrid_runtime.service import run_service

        from .service import IngestService
        from .settings import IngestSettings

    settings = IngestSettings()
    return run_service(IngestService(settings), settings)


if __name__ == "__main__":
    sys.exit(main())
