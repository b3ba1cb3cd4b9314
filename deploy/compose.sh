#!/usr/bin/env bash
# `docker compose` on deploy/compose.yaml, by whichever form of it this machine has.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
own=${XDG_CACHE_HOME:-$HOME/.cache}/rollgrid/docker-compose

if docker compose version >/dev/null 2>&1; then
    tool=(docker compose)
elif command -v docker-compose >/dev/null; then
    tool=(docker-compose)
else
    if [ ! -x "$own/bin/docker-compose" ]; then
        echo "compose: installing docker-compose from deploy/compose-tool.txt" >&2
        "${PYTHON:-python3}" -m pip install --quiet --no-deps --require-hashes --target "$own" \
            -r "$here/compose-tool.txt" >&2
    fi
    tool=("$own/bin/docker-compose")
fi
exec "${tool[@]}" -f "$here/compose.yaml" "$@"
