"The public names of every module of the package, for tests that look inside"
import importlib, pkgutil
import fastai_xla

for o in pkgutil.walk_packages(fastai_xla.__path__, 'fastai_xla.'):
    if o.name.rpartition('.')[2] in ('__main__', '_modidx', 'cli', 'all') or o.ispkg: continue
    m = importlib.import_module(o.name)
    globals().update({k: getattr(m, k) for k in getattr(m, '__all__', ())})
