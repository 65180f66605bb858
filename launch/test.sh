#!/usr/bin/env bash
# A fresh machine to a green test run: style, types, tests. Arguments go to pytest.
set -euo pipefail
. "$(dirname "$0")/environment.sh"

ruff check .
ruff format --check .
mypy
# Whole pipelines run last; a worker that has nothing left takes over some of them.
exec python -m pytest -n "${TEST_WORKERS:-2}" --dist worksteal "$@"
