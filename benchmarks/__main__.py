"""`make bench`: the control plane, scored and unscored, and what the pipe costs the engine.

ARGS='--quick' takes a tenth of the work; single benchmarks are modules of their own.
"""

from __future__ import annotations

import argparse
import importlib.util

from benchmarks import control_plane, engine_overhead
from benchmarks.report import print_result, save


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tenth of the work")
    parser.add_argument("--no-engine", action="store_true", help="leave vLLM out")
    chosen = parser.parse_args()
    groups = 200 if chosen.quick else 2000
    for scored in (False, True):
        result = control_plane.measure(groups, 8, 256, scored=scored, samplers=1)
        print_result(result)
        save(result)
    if importlib.util.find_spec("vllm") is None or chosen.no_engine:
        print("\nengine overhead: no engine here, left out")
        return
    result = engine_overhead.measure(24, 8, 128, rounds=1 if chosen.quick else 3)
    print_result(result)
    save(result)


if __name__ == "__main__":
    main()
