"""Build the documentation as a static site: a page for each notebook, by mkdocs-material.

No cell is run: nbdev's processors would run every cell with an import, without the cells before it. Instead the modules are imported, and
nbdev's `show_doc` shows what the notebooks export; examples are shown as code, tutorials with the outputs that they are stored with."""
import argparse, ast, base64, importlib, inspect, json, os, re, shutil, subprocess, sys, tempfile
from functools import cache, reduce
from pathlib import Path

root = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(root))

from nbdev.config import get_config
from nbdev.doclinks import NbdevLookup
from nbdev.showdoc import show_doc, showdoc_nm

cfg = get_config(root)
nbs = cfg.nbs_path

def text(o): return ''.join(o)
def load(path): return json.loads(path.read_text(encoding='utf-8'))['cells']
def directive(name, src): return re.search(rf'^#\|\s*{name}\b[ \t]*(.*)', src, re.M)

def module_of(path):
    "Name of the module in the package that the notebook at `path` exports, or None"
    found = [directive('default_exp', text(c['source'])) for c in load(path) if c['cell_type']=='code']
    return next((o[1].strip() for o in found if o), None)

guide = 'quickstart','forms','travel','speed','memory','recipes','checkpoints','hosts','porting'

def pages():
    "Each notebook with the name of its page: the index, the guide, the notebooks for platforms, the tutorials, the rest, and the modules in the order of their numbers"
    def named(folder, order=()): return sorted(nbs.glob(f'{folder}/*.ipynb'), key=lambda o: (order.index(o.stem) if o.stem in order else len(order), o.stem))
    api,rest = sorted(nbs.glob('[0-9]*.ipynb')), [o for o in sorted(nbs.glob('[a-z]*.ipynb')) if o.stem!='index']
    res = {o: f'{o.parent.name}/{o.stem}.md' for o in [*named('guide', guide), *named('platforms'), *named('tutorials')]} | {o: f'{o.stem}.md' for o in rest}
    return {nbs/'index.ipynb': 'index.md'} | res | {o: f'{module_of(o)}.md' for o in api}

def contents(names):
    "The table of contents of pages with these `names`: the guide, ending in what goes wrong; the notebooks for platforms; the tutorials; and the modules under the name of their chapter"
    api,res = {},dict(Home='index.md', Guide=[], Platforms=[], Tutorials=[])
    for o in names:
        if o.startswith(('guide/','platforms/','tutorials/')): res[o.split('/')[0].capitalize()].append(o)
        elif o=='troubleshooting.md': res['Guide'].append(o)
        elif o.count('.')>1: api.setdefault(o.split('.')[0].replace('_', ' ').capitalize(), []).append(o)
        elif o=='cli.md': api[o] = o
        elif o!='index.md': res[o] = o
    res['API'] = ['api.md'] + [v if k==v else {k: v} for k,v in api.items()]
    return [v if k==v else {k: v} for k,v in res.items() if v]

# ---- what a cell becomes

def heading(name, level): return f'{"#"*level} `{name}` {{#{name.lower()}}}'

def symbol(mod, name, level=3):
    "What `show_doc` shows of `name` in `mod`, under a heading that links can name; of a class its public methods too"
    sym = reduce(getattr, name.split('.'), mod)
    shown = show_doc(sym, name=name, title_level=level)
    if shown is None: return f'{heading(name, level)}\n\n{inspect.getdoc(sym) or ""}'  # of several functions, one for each type
    md = shown._repr_markdown_().removeprefix('---\n\n').replace('#LNone', f'#L{lines(mod).get(name, 1)}')
    md = re.sub(rf'^{"#"*level} .*$', lambda _: heading(name, level), md, count=1, flags=re.M)
    if not inspect.isclass(sym): return md
    public = [o for o in inside(mod) if o.startswith(f'{name}.') and '._' not in o]
    methods = [o for o in public if inspect.isfunction(f := getattr(sym, o.split('.')[1])) and f.__doc__]
    return '\n\n'.join([md] + [symbol(mod, o, level+1) for o in methods])

def top(mod): return [o for o in ast.parse(inspect.getsource(mod)).body if isinstance(o, defs)]

@cache
def inside(mod):
    "The line of each method that a class of `mod` defines, by 'Class.method'"
    return {f'{c.name}.{o.name}': o.lineno for c in top(mod) if isinstance(c, ast.ClassDef) for o in c.body if isinstance(o, defs)}

@cache
def lines(mod):
    "The line of each function, class and method of `mod`, and of what it adds to other classes"
    return inside(mod) | {n: o.lineno for o in top(mod) for n in names(o)}

defs = ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef

def names(node):
    "Public names that a top-level `node` of an exported cell defines"
    if isinstance(node, defs):
        found = showdoc_nm(node)
        return [] if node.name[0]=='_' else found if isinstance(found, list) else [found]
    return [o.id for t in getattr(node, 'targets', ()) for o in ast.walk(t) if isinstance(o, ast.Name)] if isinstance(node, ast.Assign) else []

def exported(src, mod, done):
    "The documentation of what an exported cell defines; the names are added to `done`"
    res = []
    for node in ast.parse(src).body:
        new = [o for o in names(node) if o not in done and ('.' in o or o in mod.__all__)]
        if new and isinstance(node, ast.Assign):
            code = ast.get_source_segment(src, node)
            res += [heading(new[0], 3)] + [f'<a id="{o.lower()}"></a>' for o in new[1:]] + [f'```python\n{code}\n```']
        else: res += [symbol(mod, o) for o in new]
        done.update(new)
    return res

def output(out, png):
    "One output of a cell as markdown, its image written to `png`"
    data = out.get('data', {})
    if 'image/png' in data:
        png.write_bytes(base64.b64decode(text(data['image/png'])))
        return f'![]({png.name})'
    for o in ('text/html', 'text/markdown'):
        if o in data: return text(data[o])
    plain = text(out.get('text') or data.get('text/plain', ''))
    kind = '{ .text .wrap }' if max(map(len, plain.splitlines()), default=0)>150 else 'text' # a table is no wider
    return f'```{kind}\n{plain}\n```' if plain.strip() else ''

def example(c, png):
    "A cell that is not exported: its code without directives, then its outputs"
    src = text(c['source'])
    if directive('hide', src) or directive('default_exp', src) or 'nbdev_export()' in src: return []
    code = re.sub(r'^#\|.*\n?', '', src, flags=re.M).strip()
    shown = [f'```python\n{code}\n```'] if code and not directive('echo: *false', src) else []
    return shown + [output(o, png.with_name(f"{png.stem}-{c['id']}-{i}.png")) for i,o in enumerate(c['outputs'])]

def page(path, dest):
    "Markdown of the notebook at `path`, whose images are written beside `dest`"
    name,done,res = module_of(path),set(),[]
    mod = importlib.import_module(f'{cfg.lib_path.name}.{name}') if name else None
    for c in load(path):
        src = text(c['source'])
        if c['cell_type']=='code': res += exported(src, mod, done) if mod and directive('export', src) else example(c, dest)
        elif c['cell_type']=='markdown' and not re.fullmatch(r'#.* -', src.strip()): res.append(src)
    rest = [o for o in getattr(mod, '__all__', ()) if o not in done]
    if rest: res.append('Also exported: ' + ', '.join(f'`{o}`' for o in rest) + '.')
    return '\n\n'.join(filter(None, res)) + '\n'

def overview(anchors):
    "Markdown of the page that lists every room with what it gives, by chapter; `anchors` are the headings of each page"
    res,last = ['# API\n\n> Every public name, by the room that it is made in\n\n`from fastai_xla.all import *` brings them all.'],None
    for path in sorted(nbs.glob('[0-9]*.ipynb')):
        page = f'{(room := module_of(path))}.md'
        chapter,why = room.split('.')[0].replace('_', ' ').capitalize(),text(load(path)[0]['source']).split('\n> ')[1].strip()
        if chapter!=last: res.append(f'## {chapter}\n\n| room | what it is for | names |\n|---|---|---|')
        names = sorted(importlib.import_module(f'{cfg.lib_path.name}.{room}').__all__, key=str.lower)
        def to(o): return f'[`{o}`]({page}{"#"+o.lower() if o.lower() in anchors.get(page, ()) else ""})'
        res[-1] += f"\n| [`{room}`]({page}) | {why} | {', '.join(map(to, names))} |"
        last = chapter
    return '\n\n'.join(res) + '\n'

# ---- the site

def link(md, here, pages, anchors):
    "Names of ours and of fastai's in `md` as links; links to our notebooks and pages as relative ones from the page `here`"
    url, blob = re.escape(cfg.doc_url.rstrip('/')+'/'), re.escape(f'{cfg.git_url}/blob/{cfg.branch}/{nbs.name}/')
    def to(page, frag=''):
        frag = frag.lower() if frag.lower()[1:] in anchors.get(page, ()) else ''
        return f'({os.path.relpath(page, Path(here).parent)}{frag})'
    def ours(m): return to(m[1]+'.md', m[2] or '') if m[1]+'.md' in anchors else m[0]
    def notebook(m): return to(pages[nbs/m[1]]) if nbs/m[1] in pages else m[0]
    md = re.sub(r'^(#+ )\[(`.+?`)\]\(.*?\)', r'\1\2', NbdevLookup().linkify(md), flags=re.M)  # a heading does not link to itself
    md = re.sub(rf'\({blob}([^)\s#]+\.ipynb)\)', notebook, md)
    return re.sub(rf'\({url}([^)\s#]+)\.html(#[^)\s]*)?\)', ours, md)

def write(folder):
    "Write the markdown of all pages into `folder`; returns the table of contents"
    all_pages = pages()
    md = {}
    for path,name in all_pages.items():
        (folder/name).parent.mkdir(exist_ok=True)
        md[name] = page(path, folder/name)
    anchors = {k: set(re.findall(r'^#+ .*\{#(.+)\}$|<a id="(.+?)">', v, re.M)) for k,v in md.items()}
    anchors = {k: {a or b for a,b in v} for k,v in anchors.items()}
    alone = {'index.md': '---\nhide: [navigation]\n---\n'} # beside the first page there is nothing to list
    for k,v in md.items(): (folder/k).write_text(alone.get(k, '')+link(v, k, all_pages, anchors), encoding='utf-8')
    (folder/'api.md').write_text(overview(anchors), encoding='utf-8')
    for o in ('images','docs.css'): (shutil.copytree if (nbs/o).is_dir() else shutil.copy)(nbs/o, folder/o)
    return contents(all_pages.values())

def scheme(name, icon, to, media): return dict(scheme=name, media=media, primary='indigo', accent='indigo', toggle=dict(icon=f'material/{icon}', name=f'Switch to {to} mode'))

# Nothing is fetched from elsewhere when a page is read: no fonts, and no `repo_url`, for which the theme asks GitHub.
theme = dict(name='material', font=False, icon=dict(logo='material/chart-bell-curve-cumulative'),
    features=['navigation.tabs', 'navigation.tabs.sticky', 'navigation.indexes', 'navigation.top', 'navigation.footer', 'toc.follow', 'search.suggest', 'search.highlight', 'content.code.copy'],
    palette=[scheme('default', 'weather-night', 'dark', '(prefers-color-scheme: light)'), scheme('slate', 'weather-sunny', 'light', '(prefers-color-scheme: dark)')])
words = r'[\s\-,:!?=\[\]()"`/]+|\.(?!\d)' # a name with underscores is a word

def build(out):
    "Build the site into the folder `out`; a dead link is an error"
    with tempfile.TemporaryDirectory() as tmp:
        tmp = Path(tmp)
        (tmp/'md').mkdir()
        site = dict(site_name=cfg.title, site_url=cfg.doc_url, site_description=cfg.description, docs_dir=str(tmp/'md'), site_dir=str(Path(out).resolve()),
            theme=theme, use_directory_urls=False, nav=write(tmp/'md'), extra_css=['docs.css'], plugins=[dict(search=dict(separator=words))],
            extra=dict(generator=False, social=[dict(icon='fontawesome/brands/github', link=cfg.git_url, name='The repository')]),
            markdown_extensions=['attr_list', 'sane_lists', 'admonition', 'pymdownx.superfences', dict(toc=dict(permalink=True, toc_depth=3))],
            validation=dict(links=dict(anchors='warn', not_found='warn'), nav=dict(omitted_files='warn')))
        (tmp/'mkdocs.yml').write_text(json.dumps(site), encoding='utf-8')
        env = {**os.environ, 'NO_MKDOCS_2_WARNING': '1'}
        subprocess.run([sys.executable, '-m', 'mkdocs', 'build', '--quiet', '--strict', '--config-file', str(tmp/'mkdocs.yml')], check=True, env=env)

if __name__ == '__main__':
    ap = argparse.ArgumentParser(description='Build the documentation as a static site')
    ap.add_argument('--out', default=cfg.doc_path, help='folder of the site')
    out = ap.parse_args().out
    build(out)
    print(f'The documentation is in {out}/index.html')
