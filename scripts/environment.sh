# Sourced by the other scripts: a virtual environment in .venv with gristmill installed into it.
# Usage: . scripts/environment.sh EXTRAS      (train, or ftfy,train,test)

find_python() {
    local name
    for name in ${PYTHON:-} python3.11 python3.12 python3; do
        if "$name" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null; then
            echo "$name"
            return
        fi
    done
    echo "error: wanted Python 3.11 or 3.12; found none. Install one, or set PYTHON=/path/to/python3.12" >&2
    return 1
}

install_gristmill() {
    local extras=$1 stamp wanted
    stamp=.venv/.installed-$extras
    wanted=$(cat pyproject.toml constraints.txt | cksum)
    if [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
        return
    fi
    echo "installing into .venv (once, a few minutes) …"
    [ -x .venv/bin/python ] || "$(find_python)" -m venv .venv
    .venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[$extras]"
    echo "$wanted" > "$stamp"
}

forget_stale_kernels() {  # numba looks at the file of a function it compiled, and not at those it calls
    find dedup preprocessing training -name '*.nb[ic]' ! -newer "$(git ls-files "dedup/**.py" | head -n 1)" -delete
}

install_gristmill "$1"
forget_stale_kernels
PATH=$PWD/.venv/bin:$PATH
