#!/usr/bin/env bash
# Environments with the libraries that `python -m benchmarks online --peers` compares with: Reverb in one, TorchRL and
# cpprb in another.
#
#     bash benchmarks/peers/online.sh FOLDER
#     python -m benchmarks online --peers FOLDER
#
# They are separate from .venv and from each other, because Reverb 0.14 wants TensorFlow 2.15, which wants numpy 1 and
# Python 3.9 to 3.11. PYTHON names the interpreter they are made with (default: python3.11 if there is one, else python3),
# TORCH the torch (default: the version of constraints.txt).
set -euo pipefail

if [[ -z ${1:-} ]]; then
    echo "online.sh: no folder: bash benchmarks/peers/online.sh FOLDER" >&2
    exit 2
fi
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
torch=${TORCH:-$(sed -n 's/^torch==//p' "$root/constraints.txt")}
python=${PYTHON:-$(command -v python3.11 || echo python3)}
status=0

# install ENVIRONMENT PACKAGES...: what cannot be installed does not keep the others away.
install() {
    local place=$1
    shift
    "$place/bin/python" -m pip install --disable-pip-version-check "$@" || {
        status=1
        echo "online.sh: ${*: -1} could not be installed; the benchmark will say so" >&2
    }
}

"$python" -m venv "$1/reverb"
install "$1/reverb" "numpy<2" tensorflow-cpu==2.15.1 dm-reverb==0.14.0
"$python" -m venv "$1/torch"
install "$1/torch" "torch==$torch"
for package in torchrl==0.14.0 cpprb==11.0.0; do
    install "$1/torch" "torch==$torch" "$package"
done
printf 'the interpreters: %s\n' "$1"/*/bin/python
exit "$status"
