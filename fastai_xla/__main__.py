"The `fastai-xla` command as `python -m fastai_xla`."
import sys
from fastai_xla.cli import main

if __name__=='__main__': sys.exit(main())
