"""`python -m rollgrid_sampler`: one sampler on one engine, configured by `ROLLGRID_SAMPLER_…`."""

from __future__ import annotations

import gc
import sys


def main() -> int:
    gc.disable()  # imports are kept for good: to look for garbage in them is a fifth of the start (`run_service` enables)
    from rollgrid_runtime.service import run_service

    from .service import SamplerService
    from .settings import SamplerSettings, redis_if_named

    settings = SamplerSettings()
    return run_service(SamplerService(settings, redis=redis_if_named()), settings)


if __name__ == "__main__":
    sys.exit(main())
