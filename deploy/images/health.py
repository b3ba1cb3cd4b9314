"""Container health check: `python -IS health.py URL` succeeds when URL answers 2xx within five seconds."""

import sys
import urllib.error
import urllib.request

TIMEOUT_S = 5.0


def main() -> int:
    """0 when ready; else 1, and what the service said of itself."""
    try:
        with urllib.request.urlopen(sys.argv[1], timeout=TIMEOUT_S):  # noqa: S310 - our own container
            return 0
    except OSError as error:
        body = error.read(2000).decode(errors="replace") if isinstance(error, urllib.error.HTTPError) else ""
        sys.stderr.write(f"{error} {body}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main())
