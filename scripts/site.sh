#!/usr/bin/env bash
# Builds the documentation into site/ (mkdocs.yml); a dead link fails. Arguments go to mkdocs, such as: bash scripts/site.sh -d /tmp/site
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/environment.sh train,docs
NO_MKDOCS_2_WARNING=1 mkdocs build --strict "$@"
