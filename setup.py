from configparser import ConfigParser
from pathlib import Path
from setuptools import find_packages, setup

here = Path(__file__).parent
ini = ConfigParser(delimiters=['='], interpolation=None)
ini.read(here/'settings.ini', encoding='utf-8')
cfg = ini['DEFAULT']
def lines(key): return [o.strip() for o in cfg[key].splitlines() if o.strip()]

pythons = range(int(cfg['min_python'].split('.')[1]), int(cfg['max_python'].split('.')[1])+1)
setup(
    name=cfg['dist_name'], version=cfg['version'], description=cfg['description'], keywords=cfg['keywords'].split(),
    author=cfg['author'], author_email=cfg['author_email'], license=cfg['license'], url=cfg['git_url'],
    long_description=(here/'README.md').read_text(encoding='utf-8'), long_description_content_type='text/markdown',
    packages=find_packages(include=[cfg['lib_name'], cfg['lib_name']+'.*']) + [cfg['lib_name']+'.examples'],
    package_dir={cfg['lib_name']+'.examples': 'examples'}, python_requires='>='+cfg['min_python'],
    install_requires=lines('requirements'), extras_require={o: lines(f'{o}_requirements') for o in ('tpu', 'compile', 'stream', 'dev', 'bench', 'docs')},
    entry_points={'console_scripts': lines('console_scripts'), 'nbdev': [f"{cfg['lib_name']}={cfg['lib_name']}._modidx:d"]},
    classifiers=['Development Status :: 3 - Alpha', 'Intended Audience :: Developers', 'Operating System :: OS Independent',
        'Topic :: Scientific/Engineering :: Artificial Intelligence'] + [f'Programming Language :: Python :: 3.{o}' for o in pythons])
