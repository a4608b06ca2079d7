#!/usr/bin/env bash
# Everything that one GPU can show of this library, in two visits:
#
#   benchmarks/gpu.sh prepare      # before, with a network: builds .whl and .material, and prints what travels
#   benchmarks/gpu.sh first        # on the machine, with .whl: correctness, speed, memory, kernels; at most 590 s
#   benchmarks/gpu.sh second       # on the machine, with .whl and .material: real text, engines, 4 bits; 150 s
#   benchmarks/gpu.sh report gpu.json [MORE...]    # a section for benchmarks/results.md
#   benchmarks/gpu.sh --help
#
# Figures go to $OUT, else to gpu-figures. PYTHON is the interpreter (.venv/bin/python, else python3), WHEELS the folder
# of the wheels (.whl).
set -euo pipefail

export DPLLM_GPU_BEGAN=${DPLLM_GPU_BEGAN:-$(date +%s.%N)}
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-$([ -x "$root/.venv/bin/python" ] && echo "$root/.venv/bin/python" || echo python3)}
wheels=${WHEELS:-$root/.whl}

added="$root"
if [[ " first second " == *" ${1:-} "* ]] && compgen -G "$wheels/*.whl" >/dev/null; then
  site=${TMPDIR:-/tmp}/dpllm-site-$(cksum <<<"$(ls -l "$wheels")" | cut -d' ' -f1)
  install() {
    "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$site" "$@"
  }
  if ! "$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))'; then
    echo "The wheels are for Python 3.12 and are not installed for $("$python" --version)." >&2
  else
    if [ ! -e "$site/.complete" ]; then
      install "$wheels"/*.whl || for wheel in "$wheels"/*.whl; do install "$wheel" || echo "not installed: $wheel" >&2; done
      touch "$site/.complete"
    fi
    added="$root:$site"
  fi
fi

export PYTHONPATH="$added${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
exec "$python" "$root/benchmarks/gpu" "$@"
