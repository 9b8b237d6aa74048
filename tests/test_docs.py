"`make docs` in a fresh clone: every notebook has its page, every public name is on its room's page, no link is dead."
import importlib, json, re, subprocess, sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlparse

import pytest

root = Path(__file__).parent.parent
nbs = root/'nbs'
sys.path.insert(0, str(root/'tools'))
import docs, messages

pytestmark = pytest.mark.slow

class Reader(HTMLParser):
    "Text, ids and links of a page"
    def __init__(self, path):
        super().__init__()
        self.text,self.ids,self.links,self.fetched = [],set(),[],[]
        self.feed(path.read_text(encoding='utf-8'))
        self.text = ''.join(self.text)
    def handle_data(self, data): self.text.append(data)
    def handle_starttag(self, tag, attrs):
        d = dict(attrs)
        self.ids |= {d[o] for o in ('id', 'name') if d.get(o)}
        self.links += [d[o] for o in ('href', 'src') if d.get(o)]
        if tag!='a' and d.get('rel') not in ('canonical','prev','next'): self.fetched += [d[o] for o in ('href', 'src') if d.get(o)]

@pytest.fixture(scope='module')
def site(tmp_path_factory):
    "Every page of the site, read, by its path; built as `make docs` does, but into a folder of its own"
    out = tmp_path_factory.mktemp('docs')/'site'
    res = subprocess.run([sys.executable, root/'tools/docs.py', '--out', out], capture_output=True, text=True, cwd=root)
    assert not res.returncode, res.stdout+res.stderr
    return {o.relative_to(out).as_posix(): Reader(o) for o in out.rglob('*.html')} | {'': out}

def test_every_notebook_has_a_page_of_its_own(site):
    found = docs.pages()
    assert set(found) == {*nbs.glob('*.ipynb'), *nbs.glob('guide/*.ipynb'), *nbs.glob('tutorials/*.ipynb'), *nbs.glob('platforms/*.ipynb')}
    assert len(set(found.values())) == len(found)
    for path,page in found.items():
        title = re.match(r'# (.+)', docs.text(docs.load(path)[0]['source']))[1]
        assert title.replace('`', '') in site[page.removesuffix('md')+'html'].text, f'{page} of {path.name}'

rooms = {docs.module_of(o): o for o in sorted(nbs.glob('[0-9]*.ipynb'))}

def test_every_public_name_is_on_the_page_of_its_room(site):
    missing = {}
    for room in rooms:
        names = importlib.import_module(f'{root.joinpath(docs.cfg.lib_path).name}.{room}').__all__
        missing[room] = [o for o in names if not re.search(rf'(?<!\w){re.escape(o)}(?!\w)', site[f'{room}.html'].text)]
    assert not any(missing.values()), {k: v for k,v in missing.items() if v}

def test_every_page_is_in_the_table_of_contents(site):
    listed = {urlparse(o).path for o in site['index.html'].links}
    assert {o.removesuffix('md')+'html' for o in docs.pages().values()} - {'index.html'} <= listed

def test_no_link_is_dead(site):
    "No cell has failed, and nothing is fetched from elsewhere: fonts, scripts, styles and pictures are the site's own"
    out = site['']
    for name,page in site.items():
        if name in ('', '404.html'): continue
        assert 'Traceback (most recent call last):\n' not in page.text and not (o := [o for o in page.fetched if urlparse(o).netloc]), f'{name}: {o}'
        for o in page.links:
            url = urlparse(o)
            if url.scheme or url.netloc: continue
            to = (out/name).parent/unquote(url.path) if url.path not in ('', '.') else out/name
            to = to/'index.html' if to.is_dir() else to
            assert to.exists(), f'{name} links to {o}'
            there = site.get(to.resolve().relative_to(out.resolve()).as_posix())
            assert not url.fragment or not there or url.fragment in there.ids, f'{name} links to {o}, which has no such heading'

@pytest.fixture(scope='module')
def index(site): return json.loads((site['']/'search'/'search_index.json').read_text())

def test_what_users_call_is_in_the_reference(site):
    "The methods that Learner gets, and every name of `fastai_xla.all`"
    found = {o for v in docs.users_names().values() for o in v}
    assert {*vars(importlib.import_module('fastai_xla.all'))} >= {o for o in found if '.' not in o} and {'Learner.to_tpu','Learner.to_tpu_distributed','Learner.replay'} <= found
    missing = {k for k,v in vars(importlib.import_module('fastai_xla.all')).items() if getattr(v, '__module__', '').startswith('fastai_xla') and k[0]!='_'}-found
    assert not missing, missing
    assert all(o in site['reference.html'].text for o in found)

def test_search_knows_names_and_pages(index):
    "What the search box looks into, and how it parts words: at underscores too"
    found = [o['location'] for o in index['docs'] if 'to_tpu_distributed' in o['title']+o['text']]
    assert 'guide/strategies.html' in {o.split('#')[0] for o in found} and 'reference/training.html#learner.to_tpu_distributed' in found
    parts = re.split(index['config']['separator'], 'learn.to_tpu_distributed(n_cores=8).fit(0.5)')
    assert [o for o in parts if o]==['learn','to','tpu','distributed','n','cores','8','fit','0.5']

@pytest.mark.parametrize('query,page', {'batch size': 'guide/strategies', 'learning rate': 'guide/strategies', 'fp16': 'guide/speed', 'mixed precision': 'guide/speed',
    'out of memory': 'guide/memory', 'TPU not found': 'guide/quickstart', 'slow first epoch': 'guide/speed', 'collab': 'tutorials/collab', 'throughput': 'guide/speed',
    'recompile': 'guide/speed', 'logging': 'guide/speed', 'multi-host': 'guide/hosts'}.items())
def test_search_finds_users_pages_first(index, query, page):
    "A title counts a thousand times as much as a text, so the first is the most preferred page with a title that has all words"
    def score(o):
        title = [w.lower() for w in re.split(index['config']['separator'], o['title']) if w]
        hits = sum(any(t.startswith(w.lower()) for t in title) for w in re.split(index['config']['separator'], query))
        return hits*o.get('boost', 1)/(1+len(title)/20)
    assert max(index['docs'], key=score)['location'].split('#')[0]==f'{page}.html'

def test_every_message_is_on_a_page(site):
    assert messages.page().count('\n| ')>100 and 'torch_xla is not installed' in site['messages.html'].text
