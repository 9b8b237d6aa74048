"`python forked_worker.py ...` is `python ...` on a fork, for programs that start their workers as commands (torchrun). The fork ends with this process, and its end is this one's."
import signal, sys
from forks import Forked

p = Forked(sys.argv[1:])
signal.signal(signal.SIGTERM, lambda *_: p.send_signal(signal.SIGTERM))
code = p.wait()
sys.exit(code if code>=0 else 128-code)
