# The common part of the scripts in this folder, which source it. `read_arguments` sets `recipe`, `config` and `overrides`,
# and in `environment` the variables that the accelerate config needs in addition.
# shellcheck shell=bash disable=SC2034

# The comment at the head of a script, up to the first empty line, is its usage.
usage() {
    sed -n '2,/^$/{/^#/!d;s/^# \{0,1\}//p;}' "$1" >&2
    exit 2
}

fail() {
    echo "error: $*" >&2
    exit 2
}

# named FOLDER WORD: the file that a word names, as in dpllm train: a path, or the name of a file in the folder.
named() {
    local folder="$1" word="$2" file
    for file in "$word" "$folder/${word%.yaml}.yaml"; do
        if [[ -f "$file" ]]; then
            echo "$file"
            return
        fi
    done
    fail "$word is not a file, nor the name of one in $folder/; relative paths count from $PWD"
}

# read_arguments ROOT SCRIPT "$@": changes to the root, to which paths in recipes and accelerate configs are relative.
read_arguments() {
    local root="$1" script="$2"
    shift 2
    case "${1:-}" in '' | -h | --help) usage "$root/$script" ;; esac
    [[ $# -ge 2 ]] || fail "a recipe and an accelerate config are needed; $script --help shows an example"
    cd "$root" || exit 2
    recipe="$(named recipes "$1")" || exit
    config="$(named accelerate_configs "$2")" || exit
    shift 2
    overrides=("$@")
    environment=()
    if grep -q '^use_cpu: true' "$config"; then
        # Without these accelerate would use a GPU if there is one, or treat each process as the only one.
        environment=(env CUDA_VISIBLE_DEVICES=)
        grep -q '^distributed_type: DEEPSPEED' "$config" || environment+=(ACCELERATE_USE_CPU=true)
    fi
}

is_count() {
    [[ "$2" =~ ^[1-9][0-9]*$ ]] || fail "$1 must be a number of at least 1, got '$2'"
}

# Run a launcher, or print the command when DRY_RUN=1. Ctrl-C and other signals go to the launcher's workers, once, and not
# to the launcher, which would end with a traceback or leave workers behind. The workers save a checkpoint and the privacy
# report and end with 0; the exit code is then 128 + the signal's number.
attend() {
    if [[ "${DRY_RUN:-0}" == 1 ]]; then
        run "$@"
        return
    fi
    asked=0 launcher=
    trap 'pass_on 1' HUP
    trap 'pass_on 2' INT
    trap 'pass_on 15' TERM
    trap 'pass_on 10' USR1
    set -m # a separate process group, to which the terminal does not send signals
    "$@" &
    launcher=$!
    set +m
    local code=0
    while :; do
        code=0
        wait "$launcher" || code=$?
        kill -0 "$launcher" 2>/dev/null || break
    done
    # A signal, and not the launcher, may have ended the last wait; bash keeps the launcher's exit code.
    wait "$launcher" 2>/dev/null && code=0 || code=$?
    if ((asked && code == 0)); then exit $((128 + asked)); fi
    exit "$code"
}

pass_on() {
    asked="$1"
    local workers
    workers="$(cat "/proc/$launcher/task/$launcher/children" 2>/dev/null || pgrep -P "$launcher")" || true
    # shellcheck disable=SC2086
    kill -INT ${workers:-$launcher} 2>/dev/null || true
}

# Run a command, or print it when DRY_RUN=1.
run() {
    if [[ "${DRY_RUN:-0}" == 1 ]]; then
        printf '%q ' "$@"
        echo
    else
        exec "$@"
    fi
}
