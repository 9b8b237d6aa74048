"""Processes that start at once: forks of one that has imported what tests import from others and started nothing.

`python forks.py SOCKET` serves three kinds: `script`, as `python -c`, `python file` and `python -m` start, `kernel`, as a notebook's, and `cells`, which
runs a notebook's cells without a kernel and, the only one, has imported what is ours too.
Each process is as any other: with an environment, a folder, a session and a `__main__` of its own, it may start the runtime, patch and be killed.
That is sound while the process that forks has one thread and no device, which it checks. What it does at the end of its standard input: end."""
import atexit, fcntl, gc, json, linecache, os, runpy, select, shutil, signal, socket, subprocess, sys, tempfile, threading, time
from itertools import dropwhile
from pathlib import Path
from types import ModuleType

repo = Path(__file__).resolve().parent.parent
# compiles several times as fast; what is computed is the same
quick = '--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1'

def flags(s, more=quick):
    "The XLA flags `s`, and those of `more` that they do not set"
    return ' '.join([s, *(o for o in more.split() if o.split('=')[0] not in s)]).strip()

# ---- the process that forks

def heavy(): import matplotlib.pyplot, pandas, scipy.stats, sklearn.model_selection, torch, torch_xla, torchvision, tqdm.auto

def light(kind):
    "Import what builds on fastcore and fastprogress, which look at the shell when they are imported"
    import builtins
    if kind=='script': import pytest
    else:
        builtins.get_ipython = type('ZMQInteractiveShell', (), {})
        import ipykernel.kernelapp
    import fastai.vision.all, fastai.text.all, fastai.tabular.all, fastai.collab
    if kind!='script':
        import nbdev.showdoc
        del builtins.get_ipython
    if kind=='cells':
        sys.path.insert(0, str(repo))
        import execnb.shell, fastai_xla.all

def run(args):
    "Do what `python *args` does; returns the exit code"
    sys.argv,sys.path[:] = args,[*filter(None, os.environ.get('PYTHONPATH', '').split(os.pathsep)), *site_path]
    try:
        if args[0]=='-m':
            sys.argv = args[1:]
            sys.path.insert(0, os.getcwd())
            runpy.run_module(args[1], run_name='__main__', alter_sys=True)
        else:
            code,name = (args[1],'<string>') if args[0]=='-c' else (Path(args[0]).read_text(),args[0])
            sys.argv = ['-c', *args[2:]] if args[0]=='-c' else args
            sys.path.insert(0, '' if args[0]=='-c' else str(Path(args[0]).resolve().parent))
            main = sys.modules['__main__'] = ModuleType('__main__')
            if args[0]!='-c': main.__file__ = name
            if sys.version_info>=(3,13) and args[0]=='-c': linecache.cache[name] = len(code),None,code.splitlines(True),name # which errors show since then
            exec(compile(code, name, 'exec'), vars(main))
    except SystemExit as e:
        if e.code is None or isinstance(e.code, int): return e.code or 0
        print(e.code, file=sys.stderr)
        return 1
    except BaseException as e:
        sys.last_value = e.with_traceback(e.__traceback__.tb_next) # as Python leaves it
        sys.excepthook(type(e), e, e.__traceback__)
        return 1
    return 0

def leave(code):
    "End as Python does, but without the seconds in which it takes itself apart"
    try:
        threading._shutdown()
        atexit._run_exitfuncs()
        for o in (sys.stdout, sys.stderr): o.flush()
    finally: os._exit(code)

def put_fds(fds, places):
    "Have each of `fds` be the file of that number"
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD, 1000) for fd in fds]
    for fd in fds: os.close(fd)
    for fd,i in zip(high, places):
        os.dup2(fd, i)
        os.close(fd)

def parent_is(pid):
    "Have `os.getppid` say who has asked for this process of a pool, as long as that lives, and the name of the process too"
    fd,stock = os.pidfd_open(pid),os.getppid
    os.getppid = lambda: stock() if select.select([fd], [], [], 0)[0] else pid
    Path('/proc/self/comm').write_text(f'pool of {pid}')

def become(fds, args, cwd, env, places, parent):
    "Be the process that was asked for"
    os.setsid()
    put_fds(fds, [0, 1, 2, *places])
    if parent: parent_is(parent)
    os.chdir(cwd)
    env['XLA_FLAGS'] = flags(env.get('XLA_FLAGS', ''), ours['XLA_FLAGS'])
    os.environ.clear()
    os.environ.update({**ours, **env})
    signal.signal(signal.SIGINT, signal.default_int_handler)
    warm_pools()
    leave(run(args))

def ask(conn):
    "What the other side wants: files, arguments, folder, environment, numbers of files after 2, who is to be the parent if the process outlives it"
    _,fds,*_ = socket.recv_fds(conn, 1, 16)
    with conn.makefile('r') as f: return fds,json.loads(f.readline())

def kill(pid):
    "Kill a fork and its group, which it may not have made yet, or whose processes may have ended"
    for f in (os.killpg, os.kill):
        try: f(pid, signal.SIGKILL)
        except ProcessLookupError: pass

def tell(conn, status):
    "Who has asked is told how it has ended, if they are still there"
    try: conn.sendall(b'%d\n' % status)
    except OSError: pass
    conn.close()

def serve(listener):
    "Fork what is asked for, kill what nobody waits for any more, tell the others how theirs has ended"
    running = {} # pidfd: (connection, pid, does it outlive who asks)
    while True:
        ready = select.select([listener, 0, *running, *(o for o,*_ in running.values() if o)], [], [])[0]
        if 0 in ready:
            for _,pid,_ in running.values():
                kill(pid)
                os.waitpid(pid, 0)
            return
        if listener in ready:
            conn,_ = listener.accept()
            try: fds,request = ask(conn)
            except (OSError, ValueError): # who has asked is gone
                conn.close()
                continue
            assert len(os.listdir('/proc/self/task'))==1, 'what is imported here has started a thread'
            pid = os.fork()
            if not pid:
                for o in (listener, conn, *(o for o,*_ in running.values() if o)): o.close()
                for o in running: os.close(o)
                become(fds, *request)
            for o in fds: os.close(o)
            try: conn.sendall(b'%d\n' % pid)
            except OSError: pass # gone; `ready` will say so
            running[os.pidfd_open(pid)] = conn,pid,request[-1]
        for fd,(conn,pid,outlives) in [*running.items()]:
            if fd in ready:
                _,status = os.waitpid(pid, 0)
                if conn: tell(conn, status)
                os.close(fd)
                del running[fd]
            elif conn in ready and outlives:
                conn.close()
                running[fd] = None,pid,True
            elif conn in ready: kill(pid)

def main(path):
    global ours, site_path
    listeners = {}
    kinds = 'script','kernel','cells'
    for kind in kinds:
        listeners[kind] = socket.socket(socket.AF_UNIX)
        listeners[kind].bind(f'{path}.{kind}')
        listeners[kind].listen(128)
    site_path = [o for o in sys.path[1:] if o not in os.environ.get('PYTHONPATH', '').split(os.pathsep)]
    before = dict(os.environ)
    gc.disable()
    os.environ.setdefault('TORCH_WARM_POOL', '0') # torch 2.8 would start a thread, which a fork does not take along
    heavy()
    others,kind = [],'script'
    for k in kinds[1:]:
        others.append(os.fork())
        if not others[-1]:
            others,kind = [],k
            break
    light(kind)
    gc.freeze() # a fork need not look for garbage in what was imported: a fifth of the suite's time
    gc.enable()
    ours = {k: v for k,v in os.environ.items() if before.get(k)!=v or k=='XLA_FLAGS'}
    for k,o in listeners.items():
        if k!=kind: o.close()
    serve(listeners[kind])
    if kind=='script':
        for o in others: os.waitpid(o, 0)
        shutil.rmtree(Path(path).parent, ignore_errors=True)
    os._exit(0)

# ---- on the side of the tests

_lock = threading.Lock()

def address():
    "The socket of the process that forks; the first that asks starts it for all that it starts itself"
    with _lock:
        if 'FORKS' not in os.environ: os.environ['FORKS'] = start()
    return os.environ['FORKS']

def start():
    "Start the process that forks; it ends with this one"
    path = f'{tempfile.mkdtemp()}/forks'
    env = {**os.environ, 'PJRT_DEVICE': 'CPU', 'OMP_NUM_THREADS': '1', 'MPLBACKEND': 'Agg', 'XLA_FLAGS': flags(os.environ.get('XLA_FLAGS', ''))}
    p = subprocess.Popen([sys.executable, __file__, path], stdin=subprocess.PIPE, env=env, cwd=repo, start_new_session=True)
    atexit.register(stop, p, os.getpid())
    while not os.path.exists(f'{path}.kernel'): time.sleep(.01)
    return path

def stop(p, owner):
    "End the process that forks, and all that it has forked"
    if os.getpid()!=owner: return
    p.stdin.close()
    p.wait()

class Forked(subprocess.Popen):
    "A `Popen` of `python *args` whose process is a fork"
    kind,outlives = 'script',False
    def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell,
            p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, *rest):
        assert not preexec_fn
        fds = [i if o==-1 else o for i,o in enumerate((p2cread, c2pwrite, errwrite))] + [*pass_fds]
        self._conn,until = socket.socket(socket.AF_UNIX),time.monotonic()+60
        while True:
            try: self._conn.connect(f'{address()}.{self.kind}')
            except ConnectionRefusedError: # it is starting
                if time.monotonic()>until: raise RuntimeError('The process that forks others has ended') from None
                time.sleep(.01)
            else: break
        socket.send_fds(self._conn, [b'x'], fds)
        request = [[str(o) for o in args], str(cwd or os.getcwd()), dict(os.environ if env is None else env), [*pass_fds], self.outlives and os.getpid()]
        self._conn.sendall(json.dumps(request).encode()+b'\n')
        self._answers = self._conn.makefile('r')
        self.pid = int(self._answers.readline() or -1)
        if self.pid<0: raise RuntimeError('The process that forks others has ended')
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)

    def _try_wait(self, flags):
        if flags & os.WNOHANG and not select.select([self._conn], [], [], 0)[0]: return 0,0
        return self.pid,int(self._answers.readline() or signal.SIGKILL)

    def _internal_poll(self, _deadstate=None, **kwargs):
        if self.returncode is None and self._waitpid_lock.acquire(False):
            try:
                if self.returncode is None:
                    pid,status = self._try_wait(os.WNOHANG)
                    if pid: self._handle_exitstatus(status)
            finally: self._waitpid_lock.release()
        return self.returncode

def of_ours(args, env):
    "Which of the programs that our package starts is `python *args`, 'pool', 'agent' or 'rank' of torchrun, if it is to be a fork?"
    if 'FORKS' not in os.environ or (env.get('PJRT_DEVICE'), env.get('OMP_NUM_THREADS'))!=('CPU','1'): return
    code = args[1] if args[0]=='-c' else ''
    if 'fastai_xla.launch.worker' in code: return env.get('PYTHONPATH')==os.environ.get('PYTHONPATH') and 'pool'
    if 'torch.distributed.run' in code: return 'agent'
    if 'TORCHELASTIC_RUN_ID' in {*env}-{*os.environ}: return 'rank'

class Warm(Forked):
    "A `Popen` whose process is a fork if it is `of_ours`, in the environment of the process that forks; any other, and those where there is no such process, starts as it would"
    is_fork = None
    def _execute_child(self, args, *rest):
        is_python = isinstance(args, (list,tuple)) and args[0]==sys.executable
        after = [*dropwhile(lambda o: o[0]=='-' and o not in ('-c','-m'), map(str, args[1:]))] if is_python else []
        self.is_fork = bool(after) and of_ours(after, rest[5] or os.environ)
        self.outlives = self.is_fork!='rank'
        return super()._execute_child(after, *rest) if self.is_fork else super(Forked, self)._execute_child(args, *rest)

    def _try_wait(self, flags): return super()._try_wait(flags) if self.is_fork else super(Forked, self)._try_wait(flags)
    def _internal_poll(self, *args, **kwargs): return super()._internal_poll(*args, **kwargs) if self.is_fork else super(Forked, self)._internal_poll(*args, **kwargs)

def of_pools(pid=None):
    "The processes of pools that `pid`, or this process, has started and that live"
    import psutil
    pid,alive = pid or os.getpid(),[o for o in psutil.process_iter(['name','cmdline','status']) if o.info['status']!='zombie']
    return [o for o in alive if o.info['name']==f'pool of {pid}' or f', {pid}, ' in ' '.join(o.info['cmdline'] or []) and ' serve(' in o.info['cmdline'][-1]]

def warm_pools():
    "Have the processes of pools be forks too; `os.environ.pop('FORKS')` has them start cold"
    subprocess.Popen = Warm

if __name__=='__main__': main(sys.argv[1])
