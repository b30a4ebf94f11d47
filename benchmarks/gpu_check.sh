#!/usr/bin/env bash
# GPU tests, then the GPU side of the benchmarks; needs a machine with an NVIDIA GPU and nothing from the network.
#
#     bash benchmarks/gpu_check.sh OUTDIR        (or OUT=OUTDIR bash benchmarks/gpu_check.sh)
#
# First what must be correct: the gather, selection by priority, rows that arrived from elsewhere, shards; then the
# benchmarks, whose own tests are not run here. Results are written as they come, so that a run that is cut off leaves
# what it had found. In OUTDIR: machine.txt; summary.txt, a line a stage; of each stage of tests NAME-tests.log, a line a
# test, and NAME-tests.xml; of each benchmark NAME-cuda.log and NAME-cuda.jsonl; predicted.log, the model beside it.
# Takes less than 10 minutes: every stage has its time, and what those before it left, and ends with it. A stage that
# fails does not stop the next. Benchmarks start nothing new half a minute before their time is up.
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

# gear_loader/kernels is a symbolic link to triton_kernels/. Where it was lost on the way to this machine, a copy of the
# project with a real folder is run instead.
place=$root
if ! (cd "$root" && "$python" -c 'import gear_loader.kernels') >/dev/null 2>&1; then
    place=$(mktemp -d) || exit 2
    trap 'rm -rf "$place"' EXIT
    cp -R "$root"/{gear_loader,triton_kernels,benchmarks,tests,pyproject.toml} "$place" || exit 2
    rm -rf "$place/gear_loader/kernels" && cp -R "$root/triton_kernels" "$place/gear_loader/kernels" || exit 2
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
for name in ("torch", "triton", "numpy", "numba", "typer", "rich", "gear_loader", "gear_loader.kernels.gather"):
    try:
        module = importlib.import_module(name)
        print(name, getattr(module, "__version__", "imported"))
    except Exception as error:
        print(name, "CANNOT BE IMPORTED:", error)
        if name == "numba":
            print("    the CPU path runs on plain torch; the GPU path does not need it")
        if name in ("typer", "rich"):
            print("    there are no benchmarks without it, only the tests of kernels and tables")
EOF
} 2>&1 | tee "$out/machine.txt"

if ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then
    echo "gpu_check: NO GPU: torch.cuda.is_available() is not True here; nothing was tested or measured" |
        tee "$out/summary.txt"
    exit 2
fi

status=0
planned=0
: >"$out/summary.txt"

# note NAME VERDICT SECONDS TEXT: a line of the summary.
note() {
    printf '%-14s %-14s %4d s   %s\n' "$1" "$2" "$3" "$4" >>"$out/summary.txt"
}

# stage NAME SECONDS LOG COMMAND...: run it until all stages so far have had their time, note how it went. In COMMAND,
# MINUTES stands for the minutes after which it should start nothing new.
stage() {
    local name=$1 log=$3 code verdict start=$SECONDS seconds minutes
    planned=$((planned + $2))
    seconds=$((planned - SECONDS))
    shift 3
    if ((seconds < 5)); then
        status=1
        note "$name" "NO TIME LEFT" 0 ""
        return
    fi
    minutes=$(((seconds > 45 ? seconds - 30 : seconds / 3) * 100 / 60))  # hundredths
    printf -v minutes '%d.%02d' "$((minutes / 100))" "$((minutes % 100))"
    printf '\n== %s (at most %s s)\n' "$name" "$seconds"
    timeout --kill-after=3 "$seconds" "${@/#MINUTES/$minutes}" 2>&1 </dev/null | tee "$out/$log"
    code=${PIPESTATUS[0]}
    case $code in
        0) verdict=passed ;;
        124 | 137) verdict="OUT OF TIME" ;;
        *) verdict="FAILED ($code)" ;;
    esac
    ((code == 0)) || status=1
    note "$name" "$verdict" "$((SECONDS - start))" \
        "$(tail -n 1 "$out/$log" | LC_ALL=C tr -cd "[:print:]" | cut -c 1-80)"
}

# tests NAME SECONDS FILE...: the GPU tests of these files.
tests() {
    local name=$1 seconds=$2
    shift 2
    stage "$name tests" "$seconds" "$name-tests.log" "$python" -m pytest -m gpu -v --tb=short -p no:cacheprovider \
        --junitxml="$out/$name-tests.xml" "$@"
}

# The CPU's loops, which tests and benchmarks would else compile in their own time.
stage loops 100 loops.log env PYTHONPATH=. "$python" tests/tools/compile_loops.py
tests gather 50 tests/kernels/test_gather_gpu.py
tests priority 30 tests/kernels/test_priority_gpu.py
tests place 35 tests/kernels/test_place.py tests/kernels/test_split.py tests/kernels/test_store.py \
    tests/kernels/test_append.py tests/storage/test_device_writer.py
tests packed 40 tests/kernels/test_packed_kernel.py tests/kernels/test_cast.py tests/collection/test_packed_cuda.py
tests shards 30 tests/distributed/test_packed_shards_cuda.py tests/distributed/test_shard_collector.py
# Only files that hold GPU tests: others may import packages that are not here.
mapfile -t files < <(grep -lE '\bmark\.gpu\b' tests/test_*.py tests/*/test_*.py |
    grep -vE '/test_(gather_gpu|priority_gpu|place|split|store|append|device_writer|packed_kernel|cast|packed_cuda|packed_shards_cuda|shard_collector|benchmarks.*)\.py$')
((${#files[@]})) && tests other 5 "${files[@]}"

# benchmark NAME SECONDS
benchmark() {
    stage "$1" "$2" "$1-cuda.log" "$python" -m benchmarks "$1" --device cuda --minutes MINUTES \
        --out "$out/$1-cuda.jsonl" ${options[@]+"${options[@]}"}
}

if missing=$("$python" -c 'import rich, typer' 2>&1); then
    benchmark single-server 35
    benchmark collect 80
    stage predicted 6 predicted.log "$python" -m benchmarks predict --beside "$out/collect-cuda.jsonl"
    benchmark select 45
    benchmark overlap 55
    benchmark batch-size 30
    benchmark simulator 15
    if missing=$("$python" -c 'import gymnasium, mujoco' 2>&1); then
        benchmark train 20
    else
        note train "LEFT OUT" 0 "$(tail -n 1 <<<"$missing")"
    fi
    benchmark packed 22
else
    status=1
    note benchmarks SKIPPED 0 "$(tail -n 1 <<<"$missing")"
fi

printf '\n== summary\n'
cat "$out/summary.txt"
exit "$status"
