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

@pytest.mark.parametrize('room', rooms)
def test_every_public_name_is_on_the_page_of_its_room(site, room):
    page = site[f'{room}.html']
    names = importlib.import_module(f'{root.joinpath(docs.cfg.lib_path).name}.{room}').__all__
    missing = [o for o in names if not re.search(rf'(?<!\w){re.escape(o)}(?!\w)', page.text)]
    assert not missing, f'{room}.html does not show {missing}'

def test_every_page_is_in_the_table_of_contents(site):
    listed = {urlparse(o).path for o in site['index.html'].links}
    assert {o.removesuffix('md')+'html' for o in docs.pages().values()} - {'index.html'} <= listed

def test_no_link_is_dead(site):
    out = site['']
    for name,page in site.items():
        if name in ('', '404.html'): continue
        for o in page.links:
            url = urlparse(o)
            if url.scheme or url.netloc: continue
            to = (out/name).parent/unquote(url.path) if url.path not in ('', '.') else out/name
            to = to/'index.html' if to.is_dir() else to
            assert to.exists(), f'{name} links to {o}'
            there = site.get(to.resolve().relative_to(out.resolve()).as_posix())
            assert not url.fragment or not there or url.fragment in there.ids, f'{name} links to {o}, which has no such heading'

def test_nothing_failed_on_a_page(site):
    for name,page in site.items(): assert not name or 'Traceback (most recent call last)' not in page.text, name

def test_every_public_name_is_in_the_overview(site):
    names = [o for room in rooms for o in importlib.import_module(f'fastai_xla.{room}').__all__]
    missing = {*names} - {*site['api.html'].text.replace(',', ' ').split()}
    assert len(names)>100 and not missing, missing

def test_search_knows_names_and_pages(site):
    "What the search box looks into, and how it parts words: a name with underscores is one"
    index = json.loads((site['']/'search'/'search_index.json').read_text())
    found = [o['location'] for o in index['docs'] if 'to_tpu_distributed' in o['text']]
    assert 'guide/forms.html' in {o.split('#')[0] for o in found} and 'distributed.learner.html#learner.to_tpu_distributed' in [o['location'] for o in index['docs']]
    parts = re.split(index['config']['separator'], 'learn.to_tpu_distributed(n_cores=8).fit(0.5)')
    assert [o for o in parts if o]==['learn','to_tpu_distributed','n_cores','8','fit','0.5']

def test_nothing_is_fetched_from_elsewhere(site):
    "Fonts, scripts, styles and pictures are the site's own"
    for name,page in site.items(): assert not name or not (o := [o for o in page.fetched if urlparse(o).netloc]), f'{name}: {o}'

def test_contents():
    got = docs.contents(['index.md', 'guide/a.md', 'tutorials/b.md', 'numbers.md', 'troubleshooting.md', 'train.optimizer.md', 'train.metrics.md', 'virtual_cores.comm.md', 'cli.md'])
    assert got == [{'Home': 'index.md'}, {'Guide': ['guide/a.md', 'troubleshooting.md']}, {'Tutorials': ['tutorials/b.md']}, 'numbers.md',
        {'API': ['api.md', {'Train': ['train.optimizer.md', 'train.metrics.md']}, {'Virtual cores': ['virtual_cores.comm.md']}, 'cli.md']}]
    pages = [*docs.pages().values()]
    assert pages[1:1+len(docs.guide)]==[f'guide/{o}.md' for o in docs.guide], 'the guide is in the order that `tools/docs.py` gives, and has no other page'
    assert not pages[1+len(docs.guide)].startswith('guide/')

def test_what_is_shown_of_an_exported_cell(monkeypatch, tmp_path):
    (tmp_path/'docs_room.py').write_text('''
from fastai.learner import Learner
from fastcore.basics import patch
__all__ = ['rate', 'Meter']
rate = 3
class Meter:
    "Counts"
    def add(self, n): "Add `n`"
    def _hidden(self): "No"
@patch
def to_docs(self:Learner, n:int=1): "Go there"
''')
    monkeypatch.syspath_prepend(tmp_path)
    mod = importlib.import_module('docs_room')
    done = set()
    md = '\n'.join(docs.exported((tmp_path/'docs_room.py').read_text(), mod, done))
    for o in ('### `rate` {#rate}\n```python\nrate = 3', '### `Meter` {#meter}', '#### `Meter.add` {#meter.add}', '### `Learner.to_docs` {#learner.to_docs}', 'Go there'):
        assert o in md
    assert '_hidden' not in md and done == {'rate', 'Meter', 'Learner.to_docs'}
    del mod.Learner.to_docs

def test_what_is_shown_of_other_cells(tmp_path):
    def cell(src): return dict(id='c', source=[src], outputs=[dict(data={'text/plain': ['6']})])
    assert docs.example(cell('#| echo: true\n2*3'), tmp_path/'p.md') == ['```python\n2*3\n```', '```text\n6\n```']
    long = dict(id='c', source=['f()'], outputs=[dict(text=['x '*100])])
    assert docs.example(long, tmp_path/'p.md')[1].startswith('```{ .text .wrap }\nx x'), 'a sentence is wrapped, a table is not'
    for o in ('#| hide\n2*3', '#| default_exp train.a', '#| hide\nimport nbdev; nbdev.nbdev_export()'): assert docs.example(cell(o), tmp_path/'p.md') == []

ROOM = """
def _why(n): return f'It is {n} of what it must not be: choose another' if n else 'It is nothing at all, where there must be something'
def f(x, more=''):
    if x: raise ValueError(_why(x))
    warnings.warn(f'What {x} says is left out, for want of room. '
        "Write it elsewhere")
    print(KeyError('short'), StopIteration('no error of ours, and long enough to be one'))
"""

def test_every_message_is_on_the_page_of_troubles(tmp_path):
    "Those that the code has now, and no others"
    (tmp_path/'room.py').write_text(ROOM)
    assert messages.messages(tmp_path/'room.py') == [('It is nothing at all, where there must be something','ValueError'), ('It is … of what it must not be: choose another','ValueError'),
        ('What … says is left out, for want of room. Write it elsewhere','warning')]
    stored = {o['id']: ''.join(o['source']) for o in docs.load(messages.page) if o['id'].startswith('messages-')}
    assert stored==messages.cells(), 'run `make nbs`'
    assert len(stored)>10 and sum(o.count('\n| ') for o in stored.values())>140
