#!/bin/sh
# install_torch_tpu.sh VENV PYTHON: make or mend the environment VENV with TorchTPU and this package, in which TorchTPU's device is a CPU.
# By pip, which takes torch's build for the CPU where its settings know one; PyPI's is for CUDA, several GB. VENV/.installing is there while it works.
set -e
venv=$1 python=$2 here=$(dirname "$0")/..
torch=torch==2.13.0 torchvision=torchvision==0.28.0 torch_tpu=torch_tpu==0.2.0 plugin=lammps-jax-pjrt-cpu==0.11.2
export PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONWARNINGS=ignore
if ! "$python" -c 'import sys; sys.exit(not (3,11) <= sys.version_info[:2] <= (3,13))'; then
  echo "$torch_tpu has wheels for Python 3.11 to 3.13, and $python is $("$python" --version): name another, make PYTHON_TPU=python3.11 test-tpu-backend" >&2
  exit 1
fi
if [ -e "$venv/.installing" ] || ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
  echo "Making $venv with $("$python" --version) ($python)"
  "$python" -m venv --clear "$venv"
fi
install() { "$venv/bin/python" -m pip install -q "$@" || { echo "pip could not install: $*" >&2; exit 1; }; }
touch "$venv/.installing"
install "$torch"
install "$torch" "$torchvision" "$torch_tpu" -e "$here[torch_tpu]" 'pytest>=8' 'scikit-learn>=1.5'
install --no-deps "$plugin" "$here/tests/torch_tpu/on_cpu" # not the jax that the plugin was built for
echo 'import torch_tpu_on_cpu' > "$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/torch_tpu_on_cpu.pth"
"$venv/bin/python" -W ignore -c 'import torch; assert torch.accelerator.current_accelerator().type=="tpu"' 2>/dev/null || { echo "torch_tpu found no device on its plugin for the CPU, $plugin" >&2; exit 1; }
rm -f "$venv/.installing"
