#!/usr/bin/env bash
# Several nodes: run this on each of them, with the same arguments.
#
#   NNODES=2 RDZV_ENDPOINT=node0:29500 launch/torchrun.sh RECIPE ACCELERATE_CONFIG [KEY=VALUE]...
#
# RECIPE and ACCELERATE_CONFIG are files, or names of files in recipes/ and accelerate_configs/.
#
# It starts torchrun's agent through `accelerate launch`, so that the accelerate config sets the engine. The agents connect
# to the endpoint (rendezvous c10d) and agree on the ranks there. Code, data and recipe must be the same on every node, and
# the output folder must be one folder that all of them see. Environment:
#   NNODES          nodes
#   RDZV_ENDPOINT   HOST:PORT of one of the nodes, the same everywhere; the port must be free on that node
#   NPROC_PER_NODE  processes of a node, one per GPU (8)
#   NODE_RANK       number of this node (SLURM_NODEID, or 0)
#   RDZV_ID         name of this run at the endpoint, the same everywhere, so that agents of another job are refused
#   ACCELERATE      the program, when `accelerate` is not on the PATH
#   DRY_RUN=1       print the command instead of running it

set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
# shellcheck source=launch/common.sh
source "$root/launch/common.sh"
read_arguments "$root" launch/torchrun.sh "$@"

NPROC_PER_NODE="${NPROC_PER_NODE:-8}"
NODE_RANK="${NODE_RANK:-${SLURM_NODEID:-0}}"
is_count NNODES "${NNODES:-}"
is_count NPROC_PER_NODE "$NPROC_PER_NODE"
[[ "$NODE_RANK" =~ ^[0-9]+$ ]] || fail "NODE_RANK must be a number, got '$NODE_RANK'"
[[ "${RDZV_ENDPOINT:-}" =~ ^[^:]+:[0-9]+$ ]] || fail "RDZV_ENDPOINT must be HOST:PORT, got '${RDZV_ENDPOINT:-}'"

if [[ -n "${RDZV_ID:-}" ]]; then
    export PET_RDZV_ID="$RDZV_ID" # the default of torchrun's own --rdzv_id; accelerate has no such option
fi

# Under Slurm a run that stopped in order on request is not a failure and must not end the other nodes' tasks.
trap 'code=$?; [[ -z "${SLURM_JOB_ID:-}" || "$code" != 138 ]] || exit 0' EXIT
attend "${environment[@]}" "${ACCELERATE:-accelerate}" launch --config_file "$config" \
    --num_machines "$NNODES" --num_processes "$((NNODES * NPROC_PER_NODE))" --machine_rank "$NODE_RANK" \
    --rdzv_backend c10d --rdzv_conf read_timeout=600,join_timeout=600 \
    --main_process_ip "${RDZV_ENDPOINT%:*}" --main_process_port "${RDZV_ENDPOINT##*:}" \
    recipes/finetune.py --config "$recipe" "${overrides[@]}"
