#!/usr/bin/env bash
# Every test, in three processes side by side: those with a real engine (which keeps one core busy), those that
# kill servers and cut the power (which mostly wait) with those of some folders, and all others.  Arguments go to each, as in
# `scripts/test.sh -k ledger -x`.  Fails when any of them fails.
set -uo pipefail
cd "$(dirname "$0")/.."

PYTEST="${VENV:-.venv}/bin/pytest"
NO_TESTS=5 # pytest's exit code when a selection is empty

ENGINE="vllm or clients"
FAULTS="(chaos or power or beside_faults) and not ($ENGINE)"
OTHERS="not (chaos or power or beside_faults) and not ($ENGINE)"

logs=$(mktemp -d)
pids=()
beside() { # name, selection, arguments
    "$PYTEST" -m "$2" "${@:3}" >"$logs/$1" 2>&1 </dev/null &
    pids+=($!)
}
beside faults "$FAULTS" "$@"
beside others "$OTHERS" "$@"
trap 'kill -TERM "${pids[@]}" 2>/dev/null; wait; rm -rf "$logs"; exit 130' INT TERM

"$PYTEST" -m "$ENGINE" "$@" </dev/null
codes=($?)
for number in 0 1; do
    name=$([ $number = 0 ] && echo faults || echo others)
    echo "--- $name"
    tail -n +1 --pid="${pids[$number]}" -f "$logs/$name"
    wait "${pids[$number]}"
    codes+=($?)
done
rm -rf "$logs"

[ "${codes[*]}" = "$NO_TESTS $NO_TESTS $NO_TESTS" ] && exit $NO_TESTS
for code in "${codes[@]}"; do
    [ "$code" = 0 ] || [ "$code" = $NO_TESTS ] || exit "$code"
done
