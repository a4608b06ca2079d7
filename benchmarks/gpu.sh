#!/usr/bin/env bash
# Everything that one GPU can show of this library, in one command of at most 20 minutes:
#
#   benchmarks/gpu.sh wheels .whl           # before, where there is a network: what the machine with the GPU lacks
#   benchmarks/gpu.sh                       # there: all stages; figures into $OUT, or gpu-figures
#   benchmarks/gpu.sh 1 2 --out first       # in pieces of under ten minutes: 1 2, and then 3 4 5 6
#   benchmarks/gpu.sh report first/gpu.json second/gpu.json    # a section for benchmarks/results.md
#   benchmarks/gpu.sh --toy                 # the same program on tiny sizes, without a GPU
#   benchmarks/gpu.sh --help
#
# PYTHON is the interpreter (python3), WHEELS the folder of the wheels (.whl in the repository, where there is one).
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python3}
wheels=${WHEELS:-$root/.whl}

added="$root"
if [[ " $* " != *" --toy "* && ${1:-} != wheels && ${1:-} != report ]] && compgen -G "$wheels/*.whl" >/dev/null; then
  site=${TMPDIR:-/tmp}/dpllm-site-$(cksum <<<"$(ls "$wheels")" | cut -d' ' -f1)
  if [ ! -e "$site/.complete" ]; then
    "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$site" "$wheels"/*.whl
    touch "$site/.complete"
  fi
  added="$root:$site"
fi

export PYTHONPATH="$added${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
exec "$python" "$root/benchmarks/gpu" "$@"
