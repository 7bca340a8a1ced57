#!/usr/bin/env bash
# Run every test and benchmark on a machine with a GPU and write the tables to a folder.
# Usage: [ONLY='NAME ...'] benchmarks/run_on_gpu.sh FOLDER
set -uo pipefail
cd "$(dirname "$0")/.."
results=${1:?name a folder for the tables; the pages of benchmarks/results are written by hand}
mkdir -p "$results"
failed=0
most_lines=200 # maximum number of output lines per section

section() { # section FILE TITLE COMMAND...
    case " ${ONLY:-$1} " in *" $1 "*) ;; *) return 0 ;; esac
    local file=$results/$1.md title=$2 began=$SECONDS status=0
    shift 2
    {
        printf '# %s\n\nCommand: `PYTHONPATH=. %s`\n\n' "$title" "$*"
        python3 benchmarks/measuring/machine.py
        printf '\n'
    } >"$file"
    "$@" >"$file.log" 2>&1 || status=$?
    grep -v -i warn "$file.log" | tail -n "$most_lines" >>"$file"
    printf '\nExit code %d after %d s.\n' "$status" "$((SECONDS - began))" >>"$file"
    [ "$status" -eq 0 ] || failed=1
    echo "== $title: exit code $status after $((SECONDS - began)) s"
    tail -n 12 "$file.log"
    [ -z "${KEEP_LOGS:-}" ] && rm "$file.log"
}

export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
section engine_tests_on_gpu "The engine's tests on a GPU" python3 -m pytest --run-long -p no:cacheprovider --color=no -rfE tests/mcore
section tests_on_gpu "All other tests on a GPU" \
    python3 -m pytest --run-long -p no:cacheprovider --color=no -rfE --ignore=tests/mcore tests
for tool in memcheck racecheck; do
    section "$tool" "compute-sanitizer's $tool on the kernels' tests" benchmarks/sanitize_kernels.sh "$tool"
done
section device_agreement "Same tokens on GPU and CPU" python3 benchmarks/device_agreement.py
section step_transfers "Copies and waits of a step" \
    python3 -m pytest -p no:cacheprovider --color=no -s tests/mcore/test_step_transfers.py
section first_start "The first start on a machine, and a later one" \
    python3 benchmarks/first_start.py --json "$results/first_start.json"
section load_8b "Loading an 8B NemotronH" python3 benchmarks/load_8b.py
section align_copy "Align copy compared with a plain copy" \
    python3 benchmarks/align_copy.py --json "$results/align_copy.json"
section align_copy_tilings "Align copy with other tile sizes" python3 benchmarks/align_copy.py --sweep
section state_kernels "State and convolution kernels compared with a plain copy" \
    python3 benchmarks/state_kernels.py --json "$results/state_kernels.json"
section state_kernel_tilings "State and convolution kernels with other tile sizes" \
    python3 benchmarks/state_kernels.py --sweep
section experts "MoE layers compared with the limits of the GPU" \
    python3 benchmarks/experts.py --json "$results/experts.json"
section quantized_products "Products of few tokens with FP8 weights against the bytes' floor" \
    python3 benchmarks/quantized_products.py --json "$results/quantized_products.json"
section quantized_experts "Products of experts with FP8 and NVFP4 weights against the bytes' floor" \
    python3 benchmarks/quantized_experts.py --json "$results/quantized_experts.json"
section slot_copies "Whole-slot copies against a memcpy of the same bytes" \
    python3 benchmarks/slot_copies.py --json "$results/slot_copies.json"
section attention "Attention backends, KV append and gated norm" \
    python3 benchmarks/attention.py --json "$results/attention.json"
section kernels "Kernels, compared with their floors and with other libraries" python3 benchmarks/kernels.py --json "$results/kernels.json"
section engine_8b "The whole engine with an 8B NemotronH: logits, tokens and speed" \
    python3 benchmarks/engine_8b.py --json "$results/engine_8b.json"
section ssd_scan "Prefill scan compared with mamba-ssm" python3 benchmarks/ssd_scan.py --json "$results/ssd_scan.json"
section delta_kernels "Gated DeltaNet kernels compared with fla-core and FlashInfer" \
    python3 benchmarks/delta_kernels.py --json "$results/delta_kernels.json"
section delta_tilings "Gated DeltaNet's kernels in every tiling" python3 benchmarks/delta_kernels.py --sweep
section ssd_scan_tilings "Prefill scan in every tiling" python3 benchmarks/ssd_scan.py --sweep
section step_cost "Decode steps, and the maximum gain of drafts" \
    python3 benchmarks/step_cost.py --json "$results/step_cost.json"
for shape in qwen36-27b qwen36-35b nano3; do
    weights="bf16 fp8"
    [ "$shape" = nano3 ] && weights="bf16 fp8 nvfp4"
    # shellcheck disable=SC2086  # one word per format
    section "step_cost_$shape" "Decode steps of $shape, by the format of its weights" python3 benchmarks/step_cost.py \
        --shape "$shape" --weights $weights --rows 1 8 64 --no-drafts --json "$results/step_cost_$shape.json"
    # shellcheck disable=SC2086
    section "prefill_$shape" "Prompt tokens per second of $shape, by the format of its weights" \
        python3 benchmarks/prefill.py --shape "$shape" --weights $weights --graph-tokens 8192 --json "$results/prefill_$shape.json"
done
section host_work "Host work in a decode step" python3 benchmarks/host_work.py --json "$results/host_work.json"
section changed_rows "Sampling, grammars, penalties and log-probs in a decode step" \
    python3 benchmarks/changed_rows.py --json "$results/changed_rows.json"
section sampling "Sampling alone" python3 benchmarks/sampling.py --json "$results/sampling.json"
section parallel_decode "Decoding on GPUs that share a model" \
    python3 benchmarks/parallel_decode.py --prompt-blocks 1 16 --json "$results/parallel_decode.json"
section tests_on_cards "Tests with one GPU per rank" \
    python3 -m pytest -n 0 -p no:cacheprovider --color=no -rfE tests/distributed
section chat "A chat of many users" python3 benchmarks/chat.py --json "$results/chat.json"
section dense_gemms "Dense matmuls by number of tokens" \
    python3 benchmarks/dense_gemms.py --json "$results/dense_gemms.json"
section draft_model "Draft model" python3 benchmarks/draft_model.py \
    --shape granite-small --draft-shape granite-tiny --state-gb 4 --kv-gb 2 --json "$results/draft_model.json"
section draft_chances "Drafts by acceptance rate" \
    python3 benchmarks/draft_chances.py --json "$results/draft_chances.json"
for shape in 8b nano3 qwen36-27b qwen36-35b; do
    section "mtp_drafts_$shape" "Drafts of an MTP head of $shape, by acceptance rate" python3 benchmarks/draft_chances.py \
        --shape "$shape" --mtp --drafts 1 3 5 --rows 1 8 64 --chances 0.9 0.7 0.5 0 --json "$results/mtp_drafts_$shape.json"
    section "mtp_prefill_$shape" "Prompt tokens per second of $shape with an MTP head" \
        python3 benchmarks/prefill.py --shape "$shape" --mtp --json "$results/mtp_prefill_$shape.json"
done
section mixed_steps "New turns while other requests decode" \
    python3 benchmarks/mixed_steps.py --json "$results/mixed_steps.json"
section many_prompts "Many new turns at once while other requests decode" python3 benchmarks/mixed_steps.py \
    --prompts 8 --lengths 100 200 300 400 500 --json "$results/many_prompts.json"
section long_context "Long contexts" python3 benchmarks/long_context.py --json "$results/long_context.json"
section host_tier "Sessions restored from host memory" python3 benchmarks/host_tier.py --json "$results/host_tier.json"
section turn_latency "Time to first token of later turns, and throughput without hits" \
    python3 benchmarks/turn_latency.py --json "$results/turn_latency.json"
section turns_by_length "Time to first token by number of new tokens" python3 benchmarks/turn_latency.py \
    --new-tokens 300 370 440 500 560 620 700 800 880 1000 1500 --json "$results/turns_by_length.json"
section serving "Conversations under load in every cache mode" \
    python3 benchmarks/serving.py --time-scale 0.6 --sessions 120 --max-seconds 90 --json "$results/serving.json"
section server_defaults "Default memory sizes of serve, and its speed" \
    python3 benchmarks/server_defaults.py --card-gib 0 40 --json "$results/server_defaults.json"
section speculation_on_gpu "Gain and cost of drafts" python3 benchmarks/speculation.py --device cuda
exit $failed
