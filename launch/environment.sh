# Sourced by the other scripts here: makes .venv in the repository, installs
# requirements.txt into it once (again when the project's files ask for other
# packages), and activates it. PYTHON names the interpreter, 3.11 or later; VENV another
# folder than .venv.

cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
venv=${VENV:-.venv}

is_supported() {
  "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

find_python() {
  local candidate
  for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
    if is_supported "$candidate"; then
      echo "$candidate"
      return
    fi
  done
  echo "error: no Python 3.11+ with venv among: ${PYTHON:-python3 python3.13 python3.12 python3.11};" \
    "install one (Debian: apt install python3-venv) or set PYTHON=/path/to/python" >&2
  return 1
}

if [ ! -x "$venv/bin/python" ]; then
  python=$(find_python) || exit 1
  echo "Creating $venv with $("$python" --version)"
  "$python" -m venv "$venv" || exit 1
fi
# shellcheck disable=SC1091
. "$venv/bin/activate"

wanted=$(cat requirements.txt pyproject.toml)
if [ "$wanted" != "$(cat "$venv/installed" 2>/dev/null)" ]; then
  echo "Installing requirements.txt (a few minutes the first time)"
  python -m pip install --quiet --disable-pip-version-check -r requirements.txt || exit 1
  printf '%s' "$wanted" > "$venv/installed"
fi
