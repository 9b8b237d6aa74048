"What torchrun is on a host, on this machine"
import os, subprocess, sys
from pathlib import Path

_caches = 'XDG_CACHE_HOME','TORCH_HOME','FASTAI_HOME','HF_HUB_CACHE'

def _agent(parent):
    "The program of an agent, which ends with the process `parent`"
    return '\n'.join(['import os, signal, threading, time', 'from torch.distributed.run import main', 'def watch():',
        f'    while os.getppid()=={parent}: time.sleep(1)', '    os.kill(os.getpid(), signal.SIGTERM)',
        'threading.Thread(target=watch, daemon=True).start()', 'main()'])

def start_host(i, hosts, n, command, endpoint, folder, tmp, stdout=None, **options):
    """Start the agent of host `i` of `hosts`, which starts `n` processes that run `command`, with working, temporary and cache folders of its own; returns the `Popen`.
    `endpoint` is the 'address:port' of host 0, which keeps the store where agents meet; `options` are more of torchrun's, such as `max_restarts=1`"""
    folder,tmp = Path(folder).absolute(),Path(tmp)
    for o in (folder, tmp): o.mkdir(parents=True, exist_ok=True)
    env = {'OMP_NUM_THREADS': str(max(1, os.cpu_count()//(hosts*n))), **os.environ, 'TMPDIR': str(tmp), 'PYTHONPATH': os.pathsep.join(filter(None, sys.path))}
    env.update({k: str(folder/'caches'/k.split('_')[0].lower()) for k in _caches})
    here = dict(nnodes=hosts, nproc_per_node=n, rdzv_backend='c10d', rdzv_id='run', rdzv_endpoint=endpoint, local_addr=endpoint.rpartition(':')[0])
    options = {**here, **options, 'rdzv_conf': ','.join(filter(None, [f'is_host={i==0}', options.get('rdzv_conf')]))}
    options = [f"--{k.replace('_','-')}={v}" for k,v in options.items()]
    args = [sys.executable, '-c', _agent(os.getpid()), *options, '--no-python', *command]
    return subprocess.Popen(args, env=env, cwd=folder, stdout=stdout, stderr=subprocess.STDOUT if stdout else None)
