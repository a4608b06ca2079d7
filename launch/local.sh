#!/usr/bin/env bash
# One node.
#
#   launch/local.sh RECIPE ACCELERATE_CONFIG [KEY=VALUE]...
#   launch/local.sh gpt2_e2e_full fsdp2 privacy.epsilon=3
#
# RECIPE and ACCELERATE_CONFIG are files, or names of files in recipes/ and accelerate_configs/.
#
# KEY=VALUE replaces values of the recipe. Relative paths count from the repository's root. Environment:
#   NUM_PROCESSES   processes, one per GPU; without it the accelerate config's number
#   ACCELERATE      the program, when `accelerate` is not on the PATH
#   DRY_RUN=1       print the command instead of running it

set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
# shellcheck source=launch/common.sh
source "$root/launch/common.sh"
read_arguments "$root" launch/local.sh "$@"

processes=()
if [[ -n "${NUM_PROCESSES:-}" ]]; then
    is_count NUM_PROCESSES "$NUM_PROCESSES"
    processes=(--num_processes "$NUM_PROCESSES")
fi
attend "${environment[@]}" "${ACCELERATE:-accelerate}" launch --config_file "$config" "${processes[@]}" \
    recipes/finetune.py --config "$recipe" "${overrides[@]}"
