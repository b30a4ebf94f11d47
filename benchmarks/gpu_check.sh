#!/usr/bin/env bash
# What there is to see on a machine with an NVIDIA GPU, in one call of less than nine minutes; nothing from the network.
#
#     bash benchmarks/gpu_check.sh OUTDIR        (or OUT=OUTDIR bash benchmarks/gpu_check.sh)
#
# First all loops of the CPU and all kernels are compiled, by the tests, which run side by side: what must be correct.
# Then the stages of the benchmarks, what matters most first: docs/gpu.md says what each gives. In OUTDIR, written after
# each stage, so that a run that is cut off leaves what it had found: machine.txt; summary.txt, a line a stage; tests.log,
# a line a test, with what failed; log.txt, what the benchmarks print; rows.jsonl, all that was measured.
# Every stage has its time, and what those before it left, and ends with it. A stage that fails does not stop the next.
# Benchmarks start nothing new some seconds before their time is up.
# Exit status: 0 if every stage passed, 2 if there is no GPU or no OUTDIR, else 1.
#
# PYTHON names the interpreter (default: .venv/bin/python, else python3); with TorchRL in it, that is measured too.
# BENCH has options of the benchmarks, for example --quick; STAGES names of some stages, by default all. SLOWER multiplies
# the stages' times, where there is no hurry. Without a repository the rows take their commit from GEAR_LOADER_COMMIT.
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
scratch=$(mktemp -d) || exit 2
trap 'rm -rf "$scratch"' EXIT

# gear_loader/kernels is a symbolic link to triton_kernels/. Where it was lost on the way to this machine, a copy of the
# project with a real folder is run instead.
place=$root
if ! (cd "$root" && "$python" -c 'import gear_loader.kernels') >/dev/null 2>&1; then
    place=$scratch/project
    mkdir "$place" && cp -R "$root"/{gear_loader,triton_kernels,benchmarks,examples,tests,pyproject.toml} "$place" || exit 2
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
    nvidia-smi topo -m 2>&1
    ulimit -l
    "$python" - <<'EOF'
import importlib
import sys

print("python", sys.version.split()[0])
for name in ("torch", "triton", "numpy", "numba", "typer", "rich", "torchrl", "gear_loader.kernels.gather"):
    try:
        module = importlib.import_module(name)
        print(name, getattr(module, "__version__", "imported"))
    except Exception as error:
        print(name, "CANNOT BE IMPORTED:", error)
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

# judge NAME CODE SECONDS LOG: note how a stage went, with the last line that it wrote.
judge() {
    local verdict
    case $2 in
        0) verdict=passed ;;
        124 | 137) verdict="OUT OF TIME" ;;
        *) verdict="FAILED ($2)" ;;
    esac
    (($2 == 0)) || status=1
    note "$1" "$verdict" "$3" "$(tail -n 1 "$4" | LC_ALL=C tr -cd "[:print:]" | cut -c 1-80)"
}

# plan NAME SECONDS: whether to run it; adds its time to what all stages so far may take. Sets `seconds`, and `minutes`
# after which it should start nothing new.
plan() {
    [[ -z ${STAGES:-} || " $STAGES " == *" $1 "* ]] || return 1
    planned=$((planned + $2 * ${SLOWER:-1}))
    seconds=$((planned - SECONDS))
    if ((seconds < 5)); then
        status=1
        note "$1" "NO TIME LEFT" 0 ""
        return 1
    fi
    minutes=$(((seconds > 30 ? seconds - 15 : seconds / 2) * 100 / 60)) # hundredths
    printf -v minutes '%d.%02d' "$((minutes / 100))" "$((minutes % 100))"
    printf '\n== %s (at most %s s)\n' "$1" "$seconds"
}

# stage NAME SECONDS LOG COMMAND...: run it within its time. MINUTES in COMMAND stands for those of `plan`.
stage() {
    local name=$1 log=$3 start=$SECONDS code
    plan "$1" "$2" || return 0
    shift 3
    timeout --kill-after=3 "$seconds" "${@/#MINUTES/$minutes}" 2>&1 </dev/null | tee "$scratch/stage.log"
    code=${PIPESTATUS[0]}
    { printf '\n== %s\n' "$name" && cat "$scratch/stage.log"; } >>"$out/$log"
    judge "$name" "$code" "$((SECONDS - start))" "$scratch/stage.log"
}

# tests SECONDS GROUP...: the GPU tests of groups of files at once, "NAME FILE...", each in a process of its own: most of
# their time is that of the compiler.
tests() {
    local start=$SECONDS group name
    plan tests "$1" || return 0
    shift
    for group in "$@"; do
        name=${group%% *}
        # shellcheck disable=SC2086 # files without blanks
        (
            timeout --kill-after=3 "$seconds" "$python" -m pytest -m gpu -v --tb=short -p no:cacheprovider ${group#* }
            echo $? >"$scratch/$name.code"
        ) >"$scratch/$name.log" 2>&1 </dev/null &
    done
    wait
    for group in "$@"; do
        name=${group%% *}
        { printf '\n== %s\n' "$name" && cat "$scratch/$name.log"; } | tee -a "$out/tests.log"
        judge "$name tests" "$(cat "$scratch/$name.code")" "$((SECONDS - start))" "$scratch/$name.log"
    done
}

# benchmark NAME SECONDS
benchmark() {
    stage "$1" "$2" log.txt "$python" -m benchmarks "$1" --device cuda --minutes MINUTES --out "$out/rows.jsonl" \
        ${options[@]+"${options[@]}"}
}

# The CPU's loops, on all cores, which tests and benchmarks would else compile in their own time.
stage loops 80 log.txt env PYTHONPATH=. "$python" tests/tools/compile_loops.py
# Only files that hold GPU tests: others may import packages that are not here.
mapfile -t others < <(grep -lE '\bmark\.gpu\b' tests/test_*.py tests/*/test_*.py |
    grep -vE '/test_(on_gpu|gather_gpu|priority_gpu|place|split|store|append|device_writer|packed_kernel|cast|packed_cuda|packed_shards_cuda|shard_collector|benchmarks.*)\.py$')
groups=(
    "users tests/schedules/test_on_gpu.py"
    "gather tests/kernels/test_gather_gpu.py"
    "priority tests/kernels/test_priority_gpu.py"
    "writers tests/kernels/test_store.py tests/kernels/test_append.py tests/storage/test_device_writer.py"
    "place tests/kernels/test_place.py tests/kernels/test_split.py tests/kernels/test_cast.py"
    "packed tests/kernels/test_packed_kernel.py tests/collection/test_packed_cuda.py"
    "shards tests/distributed/test_packed_shards_cuda.py tests/distributed/test_shard_collector.py"
)
((${#others[@]})) && groups+=("other ${others[*]}")
tests 110 "${groups[@]}"
if [[ -x $(command -v compute-sanitizer) ]]; then
    stage sanitizer 45 tests.log compute-sanitizer --tool memcheck --error-exitcode 9 "$python" -m pytest -m gpu -q \
        --tb=short -p no:cacheprovider tests/schedules/test_on_gpu.py -k "replays and (uniform or annealed or packed)"
elif [[ -z ${STAGES:-} ]]; then
    note sanitizer "LEFT OUT" 0 "there is no compute-sanitizer"
fi

if missing=$("$python" -c 'import rich, typer' 2>&1); then
    benchmark device 65
    benchmark collect 95
    benchmark overlap 60
    benchmark simulator 40
    benchmark packed 20
    benchmark graph 25
else
    status=1
    note benchmarks SKIPPED 0 "$(tail -n 1 <<<"$missing")"
fi

printf '\n== summary\n'
cat "$out/summary.txt"
exit "$status"
