#!/usr/bin/env bash
# Run the kernels' GPU tests under a tool of compute-sanitizer, some files at a time, and print a line for each file.
# Usage: [FILES_AT_ONCE=8] [SECONDS_EACH=600] benchmarks/sanitize_kernels.sh memcheck|racecheck
# torch's own kernels are not looked at; its cache of memory, which would hide overruns, is switched off.
set -uo pipefail
cd "$(dirname "$0")/.."
tool=${1:?memcheck or racecheck}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTORCH_NO_CUDA_MEMORY_CACHING=1 seconds=${SECONDS_EACH:-600}
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
export tool logs

check_file() {
    local name log
    name=$(basename "$1" .py) log=$logs/$1.log
    mkdir -p "$(dirname "$log")"
    timeout -k 5 "$seconds" compute-sanitizer --tool "$tool" --error-exitcode 9 --kernel-name-exclude kns=native \
        python3 -m pytest -p no:cacheprovider --color=no -n 0 -m gpu "$1" >"$log" 2>&1
    local status=$?
    printf '| %s | %s | %s | %d |\n' "$name" "$(grep -Eo '[0-9]+ (passed|failed)[^=]*' "$log" | tail -n 1)" \
        "$(grep -Eo '(ERROR|RACECHECK) SUMMARY: .*' "$log" | tail -n 1)" "$status"
    [ "$status" -eq 0 ] || grep -E '^=========|^E  ' "$log" | grep -v "SUMMARY\|COMPUTE-SANITIZER" | head -n 12
    return "$status"
}
export -f check_file

echo "| tests | result | $tool | exit code |"
echo "|---|---|---|---:|"
printf 'tests/kernels/test_%s.py\n' ssd_scan_kernels state_verify align_copy slot_copies causal_conv conv_verify \
    kv_append gated_norm | xargs -P "${FILES_AT_ONCE:-8}" -I FILE bash -c 'check_file FILE'
