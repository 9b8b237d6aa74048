"""Run each tests/test_*.py by pytest in a process of its own, a few at a time: XLA:CPU keeps every graph it compiles in its process.
The longest first, by what `--store` wrote, so that no job is left with a long one at the end.

`--level test` leaves out what is marked `slow`, `slow` runs that alone, `all` everything; `fast` is a first look in two minutes, by the files of `FAST`."""
import argparse, json, os, re, signal, subprocess, sys, tempfile, time, xml.etree.ElementTree as ET
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

root = Path(__file__).parent.parent
sys.path.insert(0, str(root/'tests'))
from forks import address, Forked
seconds = root/'tests'/'seconds.json' # of each file on two quiet cores
kinds = 'passed', 'failed', 'error', 'skipped'
budget = 30 # seconds for a file on two quiet cores
FAST = ('args repo errors memory cache nan_guard recipes parity parity_state segmentation interrupts validation_sets optim layers strict steady methods pickling '
    'batches checkpoint_store').split()
marks = dict(fast='not slow', test='not slow', slow='slow', all='')

def files_of(chapter):
    "The tests that import from `chapter`"
    return [o for o in (root/'tests').glob('test_*.py') if re.search(rf'fastai_xla\.{chapter}\b', o.read_text())]

def counts(report):
    "Number of tests of each kind in a junit `report`; a process that died before writing it is one error"
    if not report.exists(): return dict.fromkeys(kinds, 0) | {'error': 1}
    s = ET.parse(report).getroot().find('testsuite')
    n, failed, errors, skipped = (int(s.get(o)) for o in ('tests', 'failures', 'errors', 'skipped'))
    return dict(passed=n-failed-errors-skipped, failed=failed, error=errors, skipped=skipped)

def run(file, out, timeout, options):
    "Run `file` alone, print its closing line, or everything it said if it failed, and return its counts"
    report, log, start = out/f'{file.stem}.xml', out/f'{file.stem}.log', time.time()
    with log.open('w') as f:
        cmd = ['-m', 'pytest', '-q', '--tb=short', '--durations=3', f'--junitxml={report}', *options, str(file)]
        p = Forked(cmd, cwd=root, stdout=f, stderr=subprocess.STDOUT)
        running.add(p)
        try: code = p.wait(timeout)
        except subprocess.TimeoutExpired: code = f'no end after {timeout} s'
        finally: end(p)
    n, text = counts(report), log.read_text(errors='replace')
    if code==5 and options: return {**n, 'error': 0, 'seconds': 0} # nothing in this file is of the level
    if code and not n['failed']+n['error']: n['error'] = 1
    what = ', '.join(f'{v} {k}' for k,v in n.items() if v)
    print(f'{file.name:28} {what} in {time.time()-start:.0f}s' + (f' (exit: {code})\n{text}' if code else ''), flush=True)
    return {**n, 'seconds': round(time.time()-start)}

running = set()
def end(p):
    "Kill what `p` has left behind"
    try: os.killpg(p.pid, signal.SIGKILL)
    except ProcessLookupError: pass
    p.wait()
    running.discard(p)

def main():
    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument('files', nargs='*', type=Path, help='test files (default: all of tests/)')
    ap.add_argument('--level', choices=marks, default='all', help='which tests (default: all of the files)')
    ap.add_argument('--chapter', help='tests that import from this chapter of the package, and its notebooks')
    ap.add_argument('--jobs', type=int, default=2, help='how many at a time')
    ap.add_argument('--store', action='store_true', help=f'remember how long each file took, in tests/{seconds.name}')
    ap.add_argument('--timeout', type=int, default=2400, help='seconds for one file')
    a = ap.parse_args()
    files = [o.resolve() for o in a.files] or list((root/'tests').glob('test_*.py'))
    options = ['-m', marks[a.level]] if marks[a.level] else []
    if a.level=='fast' and not a.files: files = [root/'tests'/f'test_{o}.py' for o in FAST]
    if a.chapter:
        if not (root/'fastai_xla'/a.chapter).is_dir(): ap.error(f'no chapter {a.chapter!r}: {", ".join(sorted(o.parent.name for o in (root/"fastai_xla").glob("*/__init__.py")))}')
        files = files_of(a.chapter)
    took = json.loads(seconds.read_text())
    files.sort(key=lambda o: -took.get(o.stem, 1e9))
    os.environ.setdefault('PJRT_DEVICE', 'CPU')
    os.environ.setdefault('OMP_NUM_THREADS', '1')
    signal.signal(signal.SIGINT, signal.default_int_handler) # ignored in the background of a shell, and then by the tests too
    start = time.time()
    address()
    print(f'{len(files)} test files, {a.jobs} at a time', flush=True)
    with tempfile.TemporaryDirectory() as out, ThreadPoolExecutor(a.jobs) as pool:
        try:
            res = [pool.submit(run, o, Path(out), a.timeout, options) for o in files]
            if a.chapter: res.append(pool.submit(run, root/'tests'/'test_notebooks.py', Path(out), a.timeout, [*options, '-k', f'_{a.chapter}.']))
            res = [o.result() for o in res]
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            for p in list(running): end(p)
            sys.exit('interrupted')
    total = {k: sum(o[k] for o in res) for k in kinds}
    if a.store: seconds.write_text(json.dumps(took | {f.stem: o['seconds'] for f,o in zip(files, res) if o['seconds']}, indent=0, sort_keys=True)+'\n')
    if long := [f'{f.stem} {o["seconds"]} s' for f,o in zip(files, res) if o['seconds']>budget]: print(f'Longer than {budget} s: {", ".join(long)}')
    bad = total['failed'] + total['error']
    parts = [f"{total['passed']} passed", f"{total['failed']} failed"] + [f'{total[k]} {k}' for k in kinds[2:] if total[k]]
    print(f"===== {', '.join(parts)} in {time.time()-start:.0f}s =====")
    sys.exit(bad>0 or not total['passed'])

if __name__ == '__main__': main()
