#!/usr/bin/env bash
# Makes the virtual environment $1 (.venv) ready: PyTorch, then this package with its extras.
# Writes $1/.ready when all is done; the Makefile compares that file with pyproject.toml.
#
# Which PyTorch:
#   1. TORCH_INSTALL, if set: pip's arguments, such as "torch==2.11.0" or "torch --index-url URL".
#   2. else a PyTorch >= 2.9 that $1 or the interpreter already has;
#   3. else the version pinned below. On Linux, PyPI's build of it brings gigabytes of CUDA
#      libraries, also where there is no GPU. TORCH_INSTALL with PyTorch's own index of CPU builds
#      (see "Get Started" on PyTorch's site) avoids them.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

TORCH_PIN="torch==2.13.0"
venv=${1:-.venv}
pip=("$venv/bin/python" -m pip install -qq) # -qq: errors only
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore

say() { echo "setup: $*" >&2; }

is_supported() { # can this interpreter run tilewright and make a virtual environment?
    "$1" -c 'import sys, ensurepip, venv
sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null
}

has_torch() {
    "$1" -c 'import sys
from importlib.metadata import version
sys.exit(tuple(map(int, version("torch").split(".")[:2])) < (2, 9))' 2>/dev/null
}

has_gpu() { nvidia-smi -L >/dev/null 2>&1; }

is_ready() {
    [[ -e $venv/.ready && ! pyproject.toml -nt $venv/.ready && ! tools/setup.sh -nt $venv/.ready ]]
}

choose_python() {
    local candidate
    for candidate in ${PYTHON:-python3.11 python3.12 python3.13 python3.10 python3}; do
        is_supported "$candidate" && echo "$candidate" && return
    done
    say "no Python 3.10 to 3.13 with venv and ensurepip among:" \
        "${PYTHON:-python3.11 python3.12 python3.13 python3.10 python3}." \
        "Set PYTHON to one (on Debian, its python3-venv package is needed too)."
    return 1
}

create_venv() {
    local python flags=--clear
    python=$(choose_python)
    # A GPU image's own PyTorch fits its driver, so it is seen from inside rather than replaced.
    if [[ -z ${TORCH_INSTALL:-} ]] && has_torch "$python"; then
        flags+=" --system-site-packages"
    fi
    say "creating $venv with $("$python" --version)"
    "$python" -m venv $flags "$venv"
    touch "$venv/.unfinished"
}

install_torch() {
    if [[ -n ${TORCH_INSTALL:-} ]]; then
        say "installing $TORCH_INSTALL"
        # Unquoted: these are several arguments.
        "${pip[@]}" $TORCH_INSTALL
    elif ! has_torch "$venv/bin/python"; then
        say "installing $TORCH_PIN"
        has_gpu || say "no NVIDIA GPU found; if pip now downloads CUDA, see tools/setup.sh"
        "${pip[@]}" "$TORCH_PIN"
    fi
}

install_package() {
    local extras=hf,dev,bench,peers # peers brings the DSL, with which kernels compile anywhere
    say "installing tilewright[$extras] and its dependencies"
    "${pip[@]}" --editable ".[$extras]"
}

# Two make processes may run at once: the second waits, and then finds everything done.
if command -v flock >/dev/null; then
    mkdir -p .cache
    exec 9>.cache/setup.lock
    if ! flock --nonblock 9; then
        say "waiting for another setup to end"
        flock 9
    fi
fi
if is_ready; then exit; fi

# .unfinished outlives an interrupted run, whose remains are not to be trusted.
if [[ -e $venv/.unfinished ]] || ! is_supported "$venv/bin/python"; then
    create_venv
fi
install_torch
install_package
rm -f "$venv/.unfinished"
touch "$venv/.ready"
