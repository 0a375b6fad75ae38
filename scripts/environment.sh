# Sourced by the other scripts: makes .venv with gristmill installed in it, and puts it on PATH.
# Usage: . scripts/environment.sh EXTRAS      (train, or ftfy,train,test)

find_python() {
    local name
    for name in ${PYTHON:-} python3.11 python3.12 python3; do
        if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$name"
            return
        fi
    done
    echo "error: found no Python 3.11 or later. Install one, or set PYTHON=/path/to/python3" >&2
    return 1
}

is_installed() {  # EXTRAS WANTED: with these extras, alone or among others, from the requirements WANTED
    local stamp extra
    for stamp in .venv/.installed-*; do
        [ "$(cat "$stamp" 2>/dev/null)" = "$2" ] || continue
        for extra in ${1//,/ }; do
            [[ ,${stamp#*.installed-}, = *,$extra,* ]] || continue 2
        done
        return 0
    done
    return 1
}

install_gristmill() {
    local extras=$1 wanted
    wanted=$(cat pyproject.toml constraints.txt | cksum)
    if is_installed "$extras" "$wanted"; then
        return
    fi
    echo "installing into .venv (once, a few minutes) …"
    [ -x .venv/bin/python ] || "$(find_python)" -m venv .venv
    .venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[$extras]"
    .venv/bin/gristmill compile
    echo "$wanted" > ".venv/.installed-$extras"
}

install_gristmill "$1"
PATH=$PWD/.venv/bin:$PATH
