#!/usr/bin/env bash
# GPU tests, then the GPU side of the benchmarks; needs a machine with an NVIDIA GPU and nothing from the network.
#
#     bash benchmarks/gpu_check.sh OUTDIR        (or OUT=OUTDIR bash benchmarks/gpu_check.sh)
#
# Leaves in OUTDIR: machine.txt, gpu-tests.log, gpu-tests.xml, collect-cuda.log, collect-cuda.jsonl, select-cuda.log,
# select-cuda.jsonl, summary.txt.
# Takes less than 9 minutes: every stage has its time and ends with it, and a stage that fails does not stop the next.
# Exit status: 0 if every stage passed, 2 if there is no GPU or no OUTDIR, else 1.
#
# PYTHON names the interpreter (default: .venv/bin/python, else python3). Options of the benchmarks go into
# BENCH, for example BENCH=--quick. Without a repository the rows take their commit from GEAR_LOADER_COMMIT.
set -uo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd) || exit 2
out=${1:-${OUT:-}}
if [[ -z $out ]]; then
    echo "gpu_check: no output directory: give one as the first argument or in OUT" >&2
    exit 2
fi
mkdir -p "$out" || exit 2
out=$(cd "$out" && pwd) || exit 2
python=${PYTHON:-$root/.venv/bin/python}
[[ -x $(command -v "$python") ]] || python=python3
read -r -a options <<<"${BENCH:-}"
export PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1

# The import name gear_loader.kernels is the folder triton_kernels/. Where the project is not installed, and nothing
# can be, a copy in which the folder has that name is run instead.
place=$root
if ! (cd "$root" && "$python" -c 'import gear_loader.kernels') >/dev/null 2>&1; then
    place=$(mktemp -d) || exit 2
    trap 'rm -rf "$place"' EXIT
    cp -R "$root"/{gear_loader,triton_kernels,benchmarks,tests,pyproject.toml} "$place" || exit 2
    cp -R "$root/triton_kernels" "$place/gear_loader/kernels" || exit 2
    if commit=$(git -C "$root" rev-parse HEAD 2>/dev/null); then
        export GEAR_LOADER_COMMIT=$commit
    fi
fi
cd "$place" || exit 2

{
    date -u +%Y-%m-%dT%H:%M:%SZ
    echo "code: $place, commit ${GEAR_LOADER_COMMIT:-$(git rev-parse HEAD 2>/dev/null || echo unknown)}"
    nvidia-smi 2>&1 || echo "nvidia-smi: not found"
    "$python" - <<'EOF'
import importlib
import sys

print("python", sys.version.split()[0])
for name in ("torch", "triton", "numpy", "numba", "gear_loader", "gear_loader.kernels.gather"):
    try:
        module = importlib.import_module(name)
        print(name, getattr(module, "__version__", "imported"))
    except Exception as error:
        print(name, "CANNOT BE IMPORTED:", error)
        if name == "numba":
            print("    the CPU path runs on plain torch; the GPU path does not need it")
EOF
} 2>&1 | tee "$out/machine.txt"

if ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then
    echo "gpu_check: NO GPU: torch.cuda.is_available() is not True here; nothing was tested or measured" |
        tee "$out/summary.txt"
    exit 2
fi

status=0
: >"$out/summary.txt"

# stage NAME SECONDS LOG COMMAND...: run it within its time, note how it went.
stage() {
    local name=$1 seconds=$2 log=$3 code verdict start=$SECONDS
    shift 3
    printf '\n== %s (at most %s s)\n' "$name" "$seconds"
    timeout --kill-after=10 "$seconds" "$@" 2>&1 </dev/null | tee "$out/$log"
    code=${PIPESTATUS[0]}
    case $code in
        0) verdict=passed ;;
        124 | 137) verdict="OUT OF TIME" ;;
        *) verdict="FAILED ($code)" ;;
    esac
    ((code == 0)) || status=1
    printf '%-12s %-14s %4d s   %s\n' "$name" "$verdict" "$((SECONDS - start))" "$(tail -n 1 "$out/$log" | LC_ALL=C tr -cd "[:print:]" | cut -c 1-80)" \
        >>"$out/summary.txt"
}

# Only files that hold GPU tests: others may import packages that are not here.
mapfile -t files < <(grep -lE '\bmark\.gpu\b' tests/test_*.py)
if ((${#files[@]})); then
    stage "gpu tests" 170 gpu-tests.log \
        "$python" -m pytest -m gpu -q -p no:cacheprovider --junitxml="$out/gpu-tests.xml" "${files[@]}"
else
    status=1
    echo "gpu tests    FAILED         no test is marked gpu" >>"$out/summary.txt"
fi
stage "collect" 195 collect-cuda.log \
    "$python" -m benchmarks collect --device cuda --minutes 2.5 --out "$out/collect-cuda.jsonl" \
    ${options[@]+"${options[@]}"}
stage "select" 155 select-cuda.log \
    "$python" -m benchmarks select --device cuda --minutes 2 --out "$out/select-cuda.jsonl" \
    ${options[@]+"${options[@]}"}

printf '\n== summary\n'
cat "$out/summary.txt"
exit "$status"
