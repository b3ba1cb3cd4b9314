#!/usr/bin/env bash
# Every test, in two processes side by side: those with a real engine (which keeps one core busy), and all
# others.  Arguments go to both, as in `scripts/test.sh -k ledger -x`.  Fails when either fails.
set -uo pipefail
cd "$(dirname "$0")/.."

PYTEST="${VENV:-.venv}/bin/pytest"
NO_TESTS=5 # pytest's exit code when a selection is empty

others=$(mktemp)
"$PYTEST" -m "not vllm and not clients" "$@" >"$others" 2>&1 </dev/null &
pid=$!
trap 'kill -TERM "$pid" 2>/dev/null; wait "$pid"; rm -f "$others"; exit 130' INT TERM

"$PYTEST" -m "vllm or clients" "$@" </dev/null
engine=$?

echo "--- the tests without an engine"
tail -n +1 --pid="$pid" -f "$others"
wait "$pid"
rest=$?
rm -f "$others"

[ "$engine" = $NO_TESTS ] && [ "$rest" = $NO_TESTS ] && exit $NO_TESTS
for code in "$engine" "$rest"; do
    [ "$code" = 0 ] || [ "$code" = $NO_TESTS ] || exit "$code"
done
