# Sourced by the scripts beside it: what they have in common. `read_arguments` leaves `recipe`, `config` and `overrides`,
# and in `environment` the variables that the accelerate config needs besides itself.
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

# read_arguments ROOT SCRIPT "$@": goes to the root, which relative paths in recipes and accelerate configs count from.
read_arguments() {
    local root="$1" script="$2"
    shift 2
    case "${1:-}" in '' | -h | --help) usage "$root/$script" ;; esac
    [[ $# -ge 2 ]] || fail "a recipe and an accelerate config are needed; $script --help shows an example"
    cd "$root" || exit 2
    recipe="$1" config="$2"
    shift 2
    overrides=("$@")
    local file
    for file in "$recipe" "$config"; do
        [[ -f "$file" ]] || fail "$file is not a file; relative paths count from $root"
    done
    environment=()
    if grep -q '^use_cpu: true' "$config"; then
        # Without these accelerate would take a GPU where there is one, or each process for the only one.
        environment=(env CUDA_VISIBLE_DEVICES=)
        grep -q '^distributed_type: DEEPSPEED' "$config" || environment+=(ACCELERATE_USE_CPU=true)
    fi
}

is_count() {
    [[ "$2" =~ ^[1-9][0-9]*$ ]] || fail "$1 must be a number of at least 1, got '$2'"
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
