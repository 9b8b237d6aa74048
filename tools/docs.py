"""Build the documentation as a static site: a page for each notebook, by mkdocs-material.

No cell is run: nbdev's processors would run every cell with an import, without the cells before it. Instead the modules are imported, and
nbdev's `show_doc` shows what the notebooks export; examples are shown as code, tutorials with the outputs that they are stored with."""
import argparse, ast, base64, importlib, inspect, json, os, re, shutil, subprocess, sys, tempfile
from functools import cache, reduce
from pathlib import Path

root = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(root), str(root/'tools')]

from nbdev.config import get_config
from nbdev.doclinks import NbdevLookup
from nbdev.showdoc import show_doc, showdoc_nm
import messages

cfg = get_config(root)
nbs = cfg.nbs_path

def text(o): return ''.join(o)
def load(path): return json.loads(path.read_text(encoding='utf-8'))['cells']
def directive(name, src): return re.search(rf'^#\|\s*{name}\b[ \t]*(.*)', src, re.M)

def module_of(path):
    "Name of the module in the package that the notebook at `path` exports, or None"
    found = [directive('default_exp', text(c['source'])) for c in load(path) if c['cell_type']=='code']
    return next((o[1].strip() for o in found if o), None)

guide = 'quickstart','strategies','speed','replay','memory','checkpoints','recipes','porting','processes','hosts','platforms','torch_tpu','how_a_fit_runs','glossary'

def pages():
    "Each notebook with the name of its page: the index, the guide, the notebooks for platforms, the tutorials, the rest, and the modules in the order of their numbers"
    def named(folder, order=()): return sorted(nbs.glob(f'{folder}/*.ipynb'), key=lambda o: (order.index(o.stem) if o.stem in order else len(order), o.stem))
    api,rest = sorted(nbs.glob('[0-9]*.ipynb')), [o for o in sorted(nbs.glob('[a-z]*.ipynb')) if o.stem!='index']
    res = {o: f'{o.parent.name}/{o.stem}.md' for o in [*named('guide', guide), *named('platforms'), *named('tutorials')]} | {o: f'{o.stem}.md' for o in rest}
    return {nbs/'index.ipynb': 'index.md'} | res | {o: f'{module_of(o)}.md' for o in api}

def contents(names, tasks=()):
    "The table of contents of pages with these `names`: for users the guide, notebooks and the reference by `tasks`; then what has changed, and the modules by chapter"
    api,res,more = {},dict(Home='index.md', Guide=[], Platforms=[], Tutorials=[], Reference=['reference.md', *tasks]),[]
    for o in names:
        if o.startswith(('guide/','platforms/','tutorials/')): res[o.split('/')[0].capitalize()].append(o)
        elif o=='troubleshooting.md': res['Guide'] += [o, 'messages.md']
        elif o.count('.')>1: api.setdefault(o.split('.')[0], []).append({o.removesuffix('.md'): o})
        elif o=='cli.md': api['cli'] = o
        elif o!='index.md': more.append(o)
    res['About'] = [*more, {'Changelog': 'changelog.md'}, {'Contributing': 'contributing.md'}]
    res['Internals'] = ['api.md'] + [{k: v} for k,v in api.items()]
    return [{k: v} for k,v in res.items() if v]

# ---- what a cell becomes

def heading(name, level): return f'{"#"*level} `{name}` {{#{name.lower()}}}'

def symbol(mod, name, level=3):
    "What `show_doc` shows of `name` in `mod`, under a heading that links can name; of a class its public methods too"
    sym = reduce(getattr, name.split('.'), mod)
    shown = show_doc(sym, name=name, title_level=level)
    if shown is None: return f'{heading(name, level)}\n\n{inspect.getdoc(sym) or ""}'  # of several functions, one for each type
    md = shown._repr_markdown_().removeprefix('---\n\n').replace('#LNone', f'#L{lines(mod).get(name, 1)}')
    md = re.sub(rf'^{"#"*level} .*$', lambda _: heading(name, level), md, count=1, flags=re.M)
    md = with_table(md)
    if not inspect.isclass(sym): return md
    public = [o for o in inside(mod) if o.startswith(f'{name}.') and '._' not in o]
    methods = [o for o in public if inspect.isfunction(f := getattr(sym, o.split('.')[1])) and f.__doc__]
    return '\n\n'.join([md] + [symbol(mod, o, level+1) for o in methods])

def with_table(md):
    "The signature in `md` on lines that wrap, and its commented parameters as a table"
    found = re.search(r'```python\n+(def|class) (\w+)\((.*?)\n\)([^\n]*):\n+```', md, re.S)
    if not found or '# ' not in found[3]: return md
    rows,args = [],[]
    for line in found[3].strip('\n').splitlines():
        code,_,why = line.strip().partition(' # ')
        code = code.strip().rstrip(',')
        if not code: continue
        name,default = re.match(r'([^:=]+)(?::[^=]*)?(?:=(.*))?$', code).groups()
        args.append(name if default is None else f'{name}={default}')
        if name.strip('*')!='self': rows.append(f'| <code>{name.replace("*", "&#42;")}</code> | {f"`{default}`" if default is not None else ""} | {why.replace("|", chr(92)+"|")} |')
    call = f'```{{ .python .wrap }}\n{found[2]}({", ".join(args)})\n```'
    return md[:found.start()]+call+md[found.end():].rstrip()+'\n\n| parameter | default | what it is |\n|---|---|---|\n'+'\n'.join(rows)

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
    wraps = ' .wrap' if any(len(o)>95 and '  ' not in o.strip() for o in plain.splitlines()) else '' # a table does not
    return f'```{{ .text .printed{wraps} }}\n{plain}\n```' if plain.strip() else ''

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
    if name: res[0] = re.sub(r'^# (.+)\n+> (.+)', lambda m: f'# `{name}`\n\n> {m[1]}: {m[2][0].lower()+m[2][1:]}' if m[2][1:2].islower() else f'# `{name}`\n\n> {m[1]}: {m[2]}', res[0])
    rest = [o for o in getattr(mod, '__all__', ()) if o not in done]
    if rest: res.append('Also exported: ' + ', '.join(f'`{o}`' for o in rest) + '.')
    return '\n\n'.join(filter(None, res)) + '\n'

def overview(anchors):
    "Markdown of the page that lists every module with what it gives, by chapter; `anchors` are the headings of each page"
    res,last = ['# Internals\n\n> For contributors: every module, what it is for, and its names. Users find theirs in the [reference](reference.md)'],None
    for path in sorted(nbs.glob('[0-9]*.ipynb')):
        page = f'{(room := module_of(path))}.md'
        chapter,why = room.split('.')[0],text(load(path)[0]['source']).split('\n> ')[1].strip()
        if chapter!=last: res.append(f'## {chapter}\n\n| module | what it is for | names |\n|---|---|---|')
        names = sorted(importlib.import_module(f'{cfg.lib_path.name}.{room}').__all__, key=str.lower)
        def to(o): return f'[`{o}`]({page}{"#"+o.lower() if o.lower() in anchors.get(page, ()) else ""})'
        res[-1] += f"\n| [`{room}`]({page}) | {why} | {', '.join(map(to, names))} |"
        last = chapter
    return '\n\n'.join(res) + '\n'

# ---- the reference: what users call, by task

tasks = dict(  # The page of a task, its title, and the chapters whose names are on it
    training=('Train on a TPU', ('train','distributed','sharding','torch_tpu')), devices=('Devices, ranks and scripts', ('runtime','virtual_cores','launch')),
    data=('Data', ('data',)), models=('Models', ('models',)), checkpoints=('Checkpoints and export', ('checkpoint',)), recipes=('Recipes', ('recipes',)),
    monitor=('Monitoring', ('monitor',)), plan=('Memory and compilation without a TPU', ('aot',)), errors=('Errors', ()), patches=('Patches', ('patches',)))

def users_names():
    "What users call, by task: the methods that Learner gets, then the names of `from fastai_xla.all import *`; each with its module"
    face,res = vars(importlib.import_module(f'{cfg.lib_path.name}.all')),{o: {} for o in tasks}
    for room in filter(None, map(module_of, sorted(nbs.glob('[0-9]*.ipynb')))):
        mod = importlib.import_module(f'{cfg.lib_path.name}.{room}')
        for name in lines(mod):
            if '._' in name or not (name.startswith('Learner.') or name in face and face[name] is getattr(mod, name, None)): continue
            failure = isinstance(face.get(name), type) and issubclass(face[name], BaseException)
            task = 'errors' if failure else next((k for k,(_,chapters) in tasks.items() if room.split('.')[0] in chapters), 'patches')
            res[task].setdefault(name, mod)
    def place(o): return not o.startswith('Learner.'), not re.search(r'\.(to_|detach_)?tpu', o), o.lower().replace('.to_', '.').replace('.detach_', '.').replace('_ctx', ''), o[8:11]!='to_', o.endswith('ctx')
    return {k: {o: v[o] for o in sorted(v, key=place)} for k,v in res.items() if v}

def summary(mod, name): return (inspect.getdoc(reduce(getattr, name.split('.'), mod) if not name.startswith('Learner.') else getattr(mod.Learner, name[8:])) or '').split('\n')[0]

def reference():
    "The pages of the reference: an overview, and a page for each task with the documentation of its names"
    found = users_names()
    head = ['# Reference', '> For users: the methods that a Learner gets, and the names of `from fastai_xla.all import *`, by task']
    rows = {k: [f'| [`{o}`](reference/{k}.md#{o.lower()}) | {summary(mod, o)} |' for o,mod in v.items()] for k,v in found.items()}
    res = {'reference.md': '\n\n'.join(head+[f'## {tasks[k][0]}\n\n| name | what it does |\n|---|---|\n'+'\n'.join(v) for k,v in rows.items()])+'\n'}
    for k,v in found.items(): res[f'reference/{k}.md'] = '\n\n'.join([f'# {tasks[k][0]}']+[symbol(mod, o, 2) for o,mod in v.items()])+'\n'
    return res

# ---- the site

def link(md, here, pages, anchors):
    "Names of ours and of fastai's in `md` as links, those that users call to the reference; links to our notebooks and pages as relative ones from the page `here`"
    url, blob = re.escape(cfg.doc_url.rstrip('/')+'/'), re.escape(f'{cfg.git_url}/blob/{cfg.branch}/{nbs.name}/')
    def to(page, frag=''):
        frag = frag.lower()
        page = next((k for k,v in anchors.items() if k.startswith('reference/') and frag[1:] in v), page) if frag else page
        return f'({os.path.relpath(page, Path(here).parent)}{frag if frag[1:] in anchors.get(page, ()) else ""})'
    def ours(m): return to(m[1]+'.md', m[2] or '') if m[1]+'.md' in anchors else m[0]
    def notebook(m): return to(pages[nbs/m[1]]) if nbs/m[1] in pages else m[0]
    md = re.sub(r'^(#+ )\[(`.+?`)\]\(.*?\)', r'\1\2', NbdevLookup().linkify(md), flags=re.M)  # a heading does not link to itself
    md = re.sub(rf'\({blob}([^)\s#]+\.ipynb)\)', notebook, md)
    for name in ('CHANGELOG','CONTRIBUTING'): md = md.replace(f'({cfg.git_url}/blob/{cfg.branch}/{name}.md)', f'({os.path.relpath(name.lower()+".md", Path(here).parent)})')
    md = re.sub(r'^\| you see \| it means \|.*\n(\|.*\n)+', lambda m: f'<div class="symptoms" markdown>\n\n{m[0]}\n</div>\n', md, flags=re.M)  # on a phone its cells are one below the other
    raw = cfg.git_url.replace('github.com', 'raw.githubusercontent.com')+f'/{cfg.branch}/{nbs.name}/'  # pictures of notebooks that are opened elsewhere
    md = md.replace(f']({raw}', f']({os.path.relpath(".", Path(here).parent)}/')
    return re.sub(rf'\({url}([^)\s#]+)\.html(#[^)\s]*)?\)', ours, md)

def front(page):
    "What a page says of itself: how much search prefers it, users' pages before modules, and whether it lists its neighbours"
    boost = 8 if page.startswith('guide/') or page=='troubleshooting.md' else 4 if page.startswith(('reference','tutorials/','platforms/')) else 1 if page=='index.md' else .2
    return f"---\nsearch:\n  boost: {boost}\n{'hide: [navigation]' if page=='index.md' else ''}\n---\n"

def write(folder):
    "Write the markdown of all pages into `folder`; returns the table of contents"
    all_pages,md = pages(),{}
    for o in ('reference', *(Path(o).parent for o in all_pages.values())): (folder/o).mkdir(exist_ok=True)
    for path,name in all_pages.items(): md[name] = page(path, folder/name)
    md |= (ref := reference())
    for o in ('CHANGELOG','CONTRIBUTING'): md[f'{o.lower()}.md'] = (root/f'{o}.md').read_text(encoding='utf-8')
    md['messages.md'] = messages.page()
    anchors = {k: {a or b for a,b in re.findall(r'^#+ .*\{#(.+)\}$|<a id="(.+?)">', v, re.M)} for k,v in md.items()}
    md['api.md'] = overview(anchors)
    for k,v in md.items(): (folder/k).write_text(front(k)+(v if k in ('messages.md','reference.md','api.md') else link(v, k, all_pages, anchors)), encoding='utf-8')
    for o in ('images','docs.css'): (shutil.copytree if (nbs/o).is_dir() else shutil.copy)(nbs/o, folder/o)
    return contents(all_pages.values(), [o for o in ref if '/' in o])

def scheme(name, icon, to, media): return dict(scheme=name, media=media, primary='indigo', accent='indigo', toggle=dict(icon=f'material/{icon}', name=f'Switch to {to} mode'))

# Nothing is fetched from elsewhere when a page is read: no fonts, and no `repo_url`, for which the theme asks GitHub.
theme = dict(name='material', font=False, icon=dict(logo='material/chart-bell-curve-cumulative'),
    features=['navigation.tabs', 'navigation.tabs.sticky', 'navigation.indexes', 'navigation.top', 'navigation.footer', 'toc.follow', 'search.suggest', 'search.highlight', 'content.code.copy'],
    palette=[scheme('default', 'weather-night', 'dark', '(prefers-color-scheme: light)'), scheme('slate', 'weather-sunny', 'light', '(prefers-color-scheme: dark)')])
words = r'[\s\-,:!?=\[\]()"`/_]+|\.(?!\d)' # what search takes for the end of a word

def build(out):
    "Build the site into the folder `out`; a dead link is an error"
    with tempfile.TemporaryDirectory() as tmp:
        tmp = Path(tmp)
        (tmp/'md').mkdir()
        site = dict(site_name=cfg.title, site_url=cfg.doc_url, site_description=cfg.description, docs_dir=str(tmp/'md'), site_dir=str(Path(out).resolve()),
            theme=theme, use_directory_urls=False, nav=write(tmp/'md'), extra_css=['docs.css'], plugins=[dict(search=dict(separator=words))],
            extra=dict(generator=False, social=[dict(icon='fontawesome/brands/github', link=cfg.git_url, name='The repository')]),
            markdown_extensions=['attr_list', 'md_in_html', 'sane_lists', 'admonition', 'pymdownx.superfences', dict(toc=dict(permalink=True, toc_depth=3))],
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
