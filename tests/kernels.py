"""Kernels that start at once: forks of a process that has imported what ours builds on (nothing of ours) and started nothing.

Each notebook still has a process of its own, which may start the runtime, patch and be killed; only the seconds of the imports are shared.
That is sound while the process that forks has one thread and no device, which it checks."""
import atexit, json, os, signal, subprocess, sys
from pathlib import Path

from jupyter_client.manager import AsyncKernelManager
from jupyter_client.provisioning import LocalProvisioner

repo = Path(__file__).parent.parent

def imports():
    "Import what notebooks import from others, as a kernel would: fastcore and fastprogress look at the shell when they are imported"
    import builtins
    builtins.get_ipython = type('ZMQInteractiveShell', (), {})
    import ipykernel.kernelapp, matplotlib.pyplot, nbdev.showdoc, torch_xla, fastai.vision.all, fastai.text.all, fastai.tabular.all, fastai.collab
    del builtins.get_ipython

def serve():
    "Answer requests, one a line: fork a kernel (and say its pid), or say how one has ended"
    atexit.register(os._exit, 0)  # the first to register is the last to run: the seconds in which Python takes itself apart are saved
    imports()
    for line in sys.stdin:
        ask = json.loads(line)
        if 'poll' in ask: answer = ended(ask['poll'])
        else:
            n = len(os.listdir('/proc/self/task')) if os.path.isdir('/proc/self/task') else 1
            answer = os.fork() if n==1 else f'{n} threads: what is imported here has started something'
            if answer==0: return kernel(**ask)
        print(json.dumps(answer), file=answers, flush=True)

codes = {}
def ended(pid):
    "Exit code of child `pid`, None while it runs"
    if pid not in codes:
        done,status = os.waitpid(pid, os.WNOHANG)
        if not done: return None
        codes[pid] = os.waitstatus_to_exitcode(status)
    return codes[pid]

def kernel(file, cwd, env):
    "Be the kernel of connection file `file`"
    from ipykernel.kernelapp import IPKernelApp
    parent = os.getppid()
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    answers.close()
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.argv = ['ipykernel_launcher.py', '-f', file]
    sys.path[0] = ''
    IPKernelApp.launch_instance(['-f', file, f'--IPKernelApp.parent_handle={parent}'])

# ---- on the side of the tests

class Forks:
    "The process that forks, started at the first request"
    proc = None
    def ask(self, **request):
        if not self.proc:
            self.proc = subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                env={**os.environ, 'PYTHONPATH': os.pathsep.join(filter(None, [str(repo), os.environ.get('PYTHONPATH')]))})
            atexit.register(self.close)
        self.proc.stdin.write(json.dumps(request)+'\n')
        self.proc.stdin.flush()
        line = self.proc.stdout.readline()
        if not line: raise RuntimeError(f'The process that forks kernels has ended with code {self.proc.wait()}')
        return json.loads(line)

    def close(self):
        self.proc.stdin.close()
        self.proc.wait(60)
        self.proc = None

forks = Forks()

class Fork:
    "What jupyter_client asks of a kernel's Popen"
    stdin = stdout = stderr = None
    def __init__(self, **request):
        self.pid = forks.ask(**request)
        if not isinstance(self.pid, int): raise RuntimeError(self.pid)
    def poll(self): return forks.ask(poll=self.pid)
    def wait(self): return self.poll()  # called once it has ended
    def send_signal(self, sig): os.kill(self.pid, sig)
    def kill(self): self.send_signal(signal.SIGKILL)
    def terminate(self): self.send_signal(signal.SIGTERM)

class Provisioner(LocalProvisioner):
    async def launch_kernel(self, cmd, **kwargs):
        self.process = Fork(file=self.parent.connection_file, cwd=str(kwargs.get('cwd') or os.getcwd()), env=dict(kwargs.get('env') or os.environ))
        self.pid = self.pgid = self.process.pid
        return self.connection_info

class Manager(AsyncKernelManager):
    "For `NotebookClient(kernel_manager_class=)`: its kernel is a fork"
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.provisioner = Provisioner(kernel_id='fork', kernel_spec=self.kernel_spec, parent=self)

if __name__ == '__main__':
    answers = os.fdopen(os.dup(1), 'w')  # what others print goes to stderr
    os.dup2(2, 1)
    serve()
