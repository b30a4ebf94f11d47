#!/usr/bin/env bash
# An environment with the libraries that `python -m benchmarks select --peers` compares with: TorchRL, cpprb, Tianshou.
#
#     bash benchmarks/peers/select.sh FOLDER
#     python -m benchmarks select --peers FOLDER/bin/python
#
# It is separate from .venv, because what they need is not what Gear Loader needs. PYTHON names the interpreter it is
# made with (default: python3), TORCH the torch (default: the version of constraints.txt). TorchRL's C++ extension fits
# only the torch that it was built for; where it does not, the benchmark loads it with lazy binding and says so.
set -euo pipefail

if [[ -z ${1:-} ]]; then
    echo "select.sh: no folder: bash benchmarks/peers/select.sh FOLDER" >&2
    exit 2
fi
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
torch=${TORCH:-$(sed -n 's/^torch==//p' "$root/constraints.txt")}
"${PYTHON:-python3}" -m venv "$1"
# One after another: one that cannot be installed does not keep the others away.
pip=("$1/bin/python" -m pip install --disable-pip-version-check)
"${pip[@]}" "torch==$torch"
status=0
for package in torchrl==0.14.0 cpprb==11.0.0 tianshou==2.0.1; do
    "${pip[@]}" "torch==$torch" "$package" || {
        status=1
        echo "select.sh: $package could not be installed; the benchmark will say so" >&2
    }
done
printf 'the interpreter: %s\n' "$1/bin/python"
exit "$status"
