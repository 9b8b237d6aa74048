#!/bin/sh
# install.sh VENV PYTHON PIP_ARG...: make or mend the virtual environment VENV and pip install into it.
# VENV/.installing is there only while pip works: if it is found at the start, the last run was killed and VENV is made anew.
set -e
venv=$1 python=$2; shift 2
export PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONWARNINGS=ignore
if [ -e "$venv/.installing" ] || ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
  echo "Making $venv with $("$python" --version) ($python)"
  "$python" -m venv --clear "$venv"
fi
if ! "$venv/bin/python" -c 'import torch_xla' >/dev/null 2>&1; then
  echo "Installing into $venv: several GB, as PyPI's torch for Linux brings CUDA; two to five minutes, the first time only"
fi
touch "$venv/.installing"
"$venv/bin/python" -m pip install -q "$@" || { code=$?; rm -f "$venv/.installing"; echo "pip could not install: $*" >&2; exit $code; }
rm -f "$venv/.installing"
