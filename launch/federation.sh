#!/usr/bin/env bash
# A federated run with a server and nodes as processes of this machine, on loopback with TLS: the deployment to try first.
# Each node reads only its own file; the server reads none. Ends after the last round, with the report and its check.
#
#   launch/federation.sh RECIPE FOLDER NAME=COUNT=FILE... [KEY=VALUE...]
#   launch/federation.sh federate.yaml deployment north=30=north.jsonl south=30=south.jsonl train.max_steps=2
#
# NAME=COUNT=FILE: a node, its number of clients (units), and the file with their records. FOLDER must be new; the run is
# in FOLDER/run, the nodes' output in FOLDER/NAME.log. PORT (9443), WAIT (300) and SERVE (more options) are variables.
set -euo pipefail
if [ $# -lt 3 ]; then
    sed -n '2,9p' "$0" >&2
    exit 2
fi
recipe=$1 folder=$2
shift 2
names=() files=() given=() changes=()
for one in "$@"; do
    if [[ $one =~ ^([a-z0-9-]+)=([0-9]+)=(.+)$ ]]; then
        names+=("${BASH_REMATCH[1]}") files+=("${BASH_REMATCH[3]}")
        given+=(--node "${BASH_REMATCH[1]}=${BASH_REMATCH[2]}")
    else
        changes+=("$one")
    fi
done
dpllm federation prepare "$recipe" "$folder" "${given[@]}" ${changes[@]+"${changes[@]}"}

nodes=()
end() {
    for node in ${nodes[@]+"${nodes[@]}"}; do kill "$node" 2>/dev/null || true; done
    wait || true
}
trap end EXIT
for number in "${!names[@]}"; do
    name=${names[$number]}
    dpllm federation node "$folder/$name" --records "${files[$number]}" --server "127.0.0.1:${PORT:-9443}" \
        >"$folder/$name.log" 2>&1 &
    nodes+=($!)
done
# shellcheck disable=SC2086  # several options
dpllm federation serve "$folder/server" --port "${PORT:-9443}" --wait "${WAIT:-300}" ${SERVE:-} \
    "train.output_dir=$folder/run"
dpllm verify "$folder/run"
