#!/usr/bin/env bash
# Every test, in three processes side by side (tests/lanes.py): one for those with a real engine (which keeps one core
# busy), one for those that kill servers and cut the power (which mostly wait), one for others; each goes on with what
# is left of the others.  Arguments go to each, as in `scripts/test.sh -k ledger -x`.  Fails when any of them fails.
set -uo pipefail
cd "$(dirname "$0")/.."

NO_TESTS=5 # pytest's exit code when a selection is empty

# Where compiled modules may not be kept, each of the hundreds of services compiles its own anew.
unset PYTHONDONTWRITEBYTECODE

scratch=$(mktemp -d)
mkdir "$scratch/claims"
pids=()
lane() { # name, arguments
    # with `=`, and the settings named: a path among the arguments would move pytest's root, and its settings with it
    exec "${VENV:-.venv}/bin/python" -m pytest -c pyproject.toml -p tests.lanes \
        "--lane=$1" "--claims=$scratch/claims" "${@:2}" </dev/null
}
beside() {
    (lane "$@") >"$scratch/$1" 2>&1 &
    pids+=($!)
}
beside faults "$@"
beside others "$@"
trap 'kill -TERM "${pids[@]}" 2>/dev/null; wait; rm -rf "$scratch"; exit 130' INT TERM

(lane engine "$@")
codes=($?)
for number in 0 1; do
    name=$([ $number = 0 ] && echo faults || echo others)
    echo "--- $name"
    tail -n +1 --pid="${pids[$number]}" -f "$scratch/$name"
    wait "${pids[$number]}"
    codes+=($?)
done
rm -rf "$scratch"

[ "${codes[*]}" = "$NO_TESTS $NO_TESTS $NO_TESTS" ] && exit $NO_TESTS
for code in "${codes[@]}"; do
    [ "$code" = 0 ] || [ "$code" = $NO_TESTS ] || exit "$code"
done
