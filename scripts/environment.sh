# Sourced by the scripts: makes .venv on first use and puts it in front of PATH. Later calls skip the set-up until
# pyproject.toml changes. PYTHON chooses the interpreter (3.11 or newer).

# prepare_environment [EXTRA]: installs the project, editable, with the optional dependencies EXTRA.
prepare_environment() {
  local extra=${1:-} venv=$PWD/.venv stamp marker python
  export PYTHONNOUSERSITE=1
  unset PYTHONPATH PYTHONHOME
  stamp=$(cksum <pyproject.toml)
  marker=$venv/.installed${extra:+-$extra}
  if [ "$(cat "$marker" 2>/dev/null)" != "$stamp" ]; then
    if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
      python=$(find_python)
      echo "set-up: making .venv with $("$python" --version 2>&1) ($python)"
      "$python" -m venv --clear "$venv"
    fi
    echo "set-up: installing k3train${extra:+ with the extra '$extra'} into .venv (once; needs a package index)"
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile --editable ".${extra:+[$extra]}"
    echo "$stamp" >"$venv/.installed" # an extra comes with the rest
    echo "$stamp" >"$marker"
    echo "set-up: done after $SECONDS s"
  fi
  export PATH="$venv/bin:$PATH" VIRTUAL_ENV="$venv"
}

# find_python: the interpreter to use, or a message and exit status 2.
find_python() {
  local candidate
  for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
    if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 15))' 2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
  echo "k3train needs Python 3.11 to 3.14; tried: ${PYTHON:-python3 python3.13 python3.12 python3.11}." \
    "Set PYTHON=/path/to/python3.11" >&2
  exit 2
}
