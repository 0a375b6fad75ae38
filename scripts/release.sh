#!/usr/bin/env bash
# A release: builds the sdist and the wheel into dist/, checks both as an index does, and tags the version of pyproject.toml.
# Usage: bash scripts/release.sh [--tag]      The upload is left to you: twine upload dist/*
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/environment.sh ftfy,train,test,docs
version=$(python -c 'import tomllib; print(tomllib.load(open("pyproject.toml", "rb"))["project"]["version"])')
[ -z "$(git status --porcelain)" ] || { echo "error: the checkout has changes; commit them first" >&2; exit 1; }
grep -q "^## \[$version\]" CHANGELOG.md || { echo "error: CHANGELOG.md has no section [$version]; write it first" >&2; exit 1; }
rm -rf dist
python -m build --no-isolation
twine check --strict dist/*
if [ "${1:-}" = --tag ]; then
    git tag -a "v$version" -m "Gristmill $version"
    echo "tagged v$version; push it with: git push origin v$version"
fi
