#!/usr/bin/env bash
# Run the GPU tests of the kernels under a compute-sanitizer tool. Tests are divided into portions, which run concurrently
# on all GPUs. The script prints one line per portion.
# Usage: [GPUS='0 1 ...'] [PORTIONS_AT_ONCE=14] [TESTS_EACH=40] [SECONDS_EACH=300] benchmarks/sanitize_kernels.sh memcheck|racecheck [FILE...]
# torch's own kernels are excluded. Its caching allocator would hide out-of-bounds accesses, so it is disabled. Without
# it CUDA graphs cannot be captured, so tests of graphs are excluded.
set -uo pipefail
cd "$(dirname "$0")/.."
tool=${1:?memcheck or racecheck}
shift
[ $# -gt 0 ] || set -- tests/kernels/test_{ssd_scan_kernels,state_verify,state_replay,boundary_folds,align_copy,slot_copies,causal_conv}.py \
    tests/kernels/test_{conv_verify,kv_append,gated_norm,residual_norm,one_token,few_tokens,grouped_gemm,routing}.py
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTORCH_NO_CUDA_MEMORY_CACHING=1 seconds=${SECONDS_EACH:-300}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export tool folder

gpus=${GPUS:-$(nvidia-smi --query-gpu=index --format=csv,noheader | tr '\n' ' ')}

check_portion() {
    local log=$2.log status=0
    export CUDA_VISIBLE_DEVICES=$1
    shift
    mapfile -t tests <"$1"
    timeout -k 5 "$seconds" compute-sanitizer --tool "$tool" --error-exitcode 9 --kernel-name-exclude kns=native \
        python3 -m pytest -p no:cacheprovider --color=no -n 0 "${tests[@]}" >"$log" 2>&1 || status=$?
    printf '| %s | %s | %s | %d |\n' "$(basename "$1")" "$(grep -Eo '[0-9]+ (passed|failed).*' "$log" | tail -n 1)" \
        "$(grep -Eo '(ERROR|RACECHECK) SUMMARY: .*' "$log" | tail -n 1)" "$status"
    [ "$status" -eq 0 ] || grep -E '^=========|^E  ' "$log" | grep -v 'SUMMARY\|COMPUTE-SANITIZER\|Host Frame' | head -n 12
    return "$status"
}
export -f check_portion

echo "| tests | result | $tool | exit code |"
echo "|---|---|---|---:|"
for file in "$@"; do
    python3 -m pytest --collect-only -p no:cacheprovider -n 0 -m gpu -k "not graph" "$file" 2>/dev/null | grep '::' |
        split -l "${TESTS_EACH:-40}" -a 3 -d - "$folder/$(basename "$file" .py)-"
done
find "$folder" -type f | sort | awk -v gpus="$gpus" 'BEGIN { count = split(gpus, gpu, " ") } { print gpu[NR % count + 1], $0 }' |
    xargs -P "${PORTIONS_AT_ONCE:-14}" -L 1 bash -c 'check_portion "$@"' _
