"Run each test file of this folder by pytest in a process of its own, two at a time: XLA:CPU keeps every program it compiles in its process"
import argparse, re, subprocess, sys, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

here = Path(__file__).parent

def run(file):
    start = time.time()
    cmd = [sys.executable, '-m', 'pytest', '-q', '--durations=3', f'--confcutdir={here}', '-p', 'no:cacheprovider', str(file)]
    res = subprocess.run(cmd, cwd=here.parent.parent, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors='replace')
    said = re.findall(r'^(?:=+ )?(\d+ \w+.*?)(?: in .*)?$', res.stdout, re.M)
    print(f'{file.name:28} {said[-1] if said else "nothing"} in {time.time()-start:.0f}s' + (f' (exit: {res.returncode})\n{res.stdout}' if res.returncode else ''), flush=True)
    return res.returncode, sum(map(int, re.findall(r'(\d+) passed', said[-1] if said else '')))

if __name__ == '__main__':
    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument('files', nargs='*', type=Path)
    ap.add_argument('--jobs', type=int, default=2)
    a = ap.parse_args()
    start = time.time()
    with ThreadPoolExecutor(a.jobs) as pool: res = list(pool.map(run, a.files or sorted(here.glob('test_*.py'))))
    print(f"===== {sum(n for _,n in res)} passed, {sum(c!=0 for c,_ in res)} files failed in {time.time()-start:.0f}s =====")
    sys.exit(any(c for c,_ in res))
