"""`python -m rollgrid_ingest`."""

from __future__ import annotations

import gc
import sys


def main() -> int:
    gc.disable()  # imports are kept for good: to look for garbage in them is a fifth of the start (`run_service` enables)
    from rollgrid_runtime.service import run_service

    from .service import IngestService
    from .settings import IngestSettings

    settings = IngestSettings()
    return run_service(IngestService(settings), settings)


if __name__ == "__main__":
    sys.exit(main())
