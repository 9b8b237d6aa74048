"Tests run on XLA:CPU, draw nothing on a screen, and leave their files in a folder of their own."
import os
os.environ.setdefault('PJRT_DEVICE', 'CPU')
os.environ.setdefault('OMP_NUM_THREADS', '1')
os.environ.setdefault('MPLBACKEND', 'Agg')

from forks import flags, warm_pools
os.environ['XLA_FLAGS'] = flags(os.environ.get('XLA_FLAGS', ''))

warm_pools()

import pytest

@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    "fastai saves models, logs and exports below the current folder"
    monkeypatch.chdir(tmp_path)

def pytest_configure(config): config.addinivalue_line('markers', 'slow: takes long; the same promise has a quick test too')
