"""Run as `python -I -S launch.py SIGNAL PARENT ARGV…`: become ARGV, tied to the life of the parent.

The kernel sends SIGNAL to this process when the parent (its main thread) ends, by SIGKILL too.  A
program of its own, because code between fork and exec is not safe in a process with threads.
"""

import ctypes
import os
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Ask the kernel for the signal, check that the parent is still there, then exec."""
    number, parent, argv = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)
        if os.getppid() != parent:  # it ended before the request was in place
            sys.exit(1)
    try:
        os.execv(argv[0], argv)  # noqa: S606
    except OSError as error:
        sys.stderr.write(f"cannot run {argv[0]}: {error}\n")
        sys.exit(127)


if __name__ == "__main__":
    main()
