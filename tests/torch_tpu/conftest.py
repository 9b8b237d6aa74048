"Tests of the second backend run on real torch_tpu, whose device is a PJRT plugin for the CPU (see on_cpu), and are left alone by `make test`"
import os, sys
from pathlib import Path
os.environ.setdefault('OMP_NUM_THREADS', '1')
os.environ.setdefault('MPLBACKEND', 'Agg')
os.environ['XLA_FLAGS'] = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0" # LLVM's optimizations take most of the time of a test
os.environ['TIMM_FUSED_ATTN'] = '0' # torch_tpu's attention is a kernel that only a TPU has
sys.path.insert(0, str(Path(__file__).parent.parent))
import pytest

@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    "fastai saves models, logs and exports below the current folder"
    monkeypatch.chdir(tmp_path)
