#!/bin/sh
# install.sh VENV PYTHON PIP_ARG...: make or mend the virtual environment VENV and install into it.
# uv needs a fifth of pip's time; where it cannot be had, or fails, pip installs: it also knows the user's pip.conf.
# VENV/.installing is there only while they work: if it is found at the start, the last run was killed and VENV is made anew.
set -e
venv=$1 python=$2; shift 2
export PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONWARNINGS=ignore
if [ -e "$venv/.installing" ] || ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
  echo "Making $venv with $("$python" --version) ($python)"
  "$python" -m venv --clear "$venv"
fi
if ! "$venv/bin/python" -c 'import torch_xla' >/dev/null 2>&1; then
  echo "Installing into $venv: several GB, as PyPI's torch for Linux brings CUDA; one to five minutes, the first time only"
fi
touch "$venv/.installing"
export UV_HTTP_TIMEOUT="${UV_HTTP_TIMEOUT:-180}"
"$venv/bin/python" -m pip install -q 'uv>=0.5' 2>/dev/null && "$venv/bin/uv" pip install -q --compile-bytecode --python "$venv/bin/python" "$@" 2>"$venv/.installing" || \
  "$venv/bin/python" -m pip install -q "$@" || { code=$?; rm -f "$venv/.installing"; echo "pip could not install: $*" >&2; exit $code; }
rm -f "$venv/.installing"
