#!/usr/bin/env bash
# Builds the documentation's site into site/, warnings as errors, and looks at its links. The tools have an
# environment of their own, so that training needs none of them.
# Usage: tools/site/build.sh VENV ENVIRONMENT    VENV: the project's, for uv and its Python
set -euo pipefail
venv=$1
environment=$2
if ! cmp --silent docs/requirements.lock "$environment/built-from.lock"; then
  rm -rf "$environment"
  "$venv/bin/uv" venv --quiet --python "$venv/bin/python" "$environment"
  VIRTUAL_ENV=$PWD/$environment "$venv/bin/uv" pip sync --quiet docs/requirements.lock
  cp docs/requirements.lock "$environment/built-from.lock"
fi
# mkdocs-material prints a notice about its successor.
NO_MKDOCS_2_WARNING=1 DISABLE_MKDOCS_2_WARNING=true "$environment/bin/python" -m mkdocs build --strict --clean
"$environment/bin/python" tools/site/check.py site
