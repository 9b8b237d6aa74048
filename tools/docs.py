"Build the documentation into _docs: by Quarto where it is installed, otherwise by mkdocs from the same processed notebooks."
import base64, json, re, shutil, subprocess, sys, warnings
from pathlib import Path

from nbdev.config import get_config
from nbdev.serve import proc_nbs

cfg = get_config(Path(__file__).parent.parent)
proc = cfg.config_path/'_proc'
md = proc/'md'

def text(o): return ''.join(o)

def output(out, png):
    "One output of a cell as markdown, its image written to `png`"
    data = out.get('data', {})
    if 'image/png' in data:
        png.write_bytes(base64.b64decode(text(data['image/png'])))
        return f'![]({png.name})'
    for o in ('text/html', 'text/markdown'):
        if o in data: return re.sub(r'\{target=[^}]*\}', '', text(data[o])).removeprefix('---\n')
    plain = text(out.get('text') or data.get('text/plain', ''))
    return f'```text\n{plain}\n```' if plain.strip() else ''

def cell(c, stem):
    "A processed cell as markdown: Quarto's directives are obeyed and left out, its raw cells dropped"
    src = text(c['source'])
    if c['cell_type']!='code': return src if c['cell_type']=='markdown' else ''
    code = re.sub(r'^#\|.*\n?', '', src, flags=re.M).strip()
    shown = [f'```python\n{code}\n```'] if code and not re.search(r'^#\|\s*echo:\s*false', src, re.M) else []
    return '\n\n'.join(shown + [output(o, md/f"{stem}-{c['id']}-{i}.png") for i,o in enumerate(c['outputs'])])

def page(path):
    "Write the processed notebook at `path` as a page named like its module; returns the page's name"
    raw, *cells = json.loads(path.read_text(encoding='utf-8'))['cells']
    front = dict(re.findall(r'^(title|description): (.+)$', text(raw['source']), re.M))
    stem = re.sub(r'^\d+_', '', path.stem)
    head = [f"# {front['title']}", f"> {front['description']}"]
    body = '\n\n'.join(head + [cell(c, stem) for c in cells])
    (md/f'{stem}.md').write_text(body.replace(cfg.doc_url.rstrip('/')+'/', ''), encoding='utf-8')
    return f'{stem}.md'

def mkdocs():
    "The index first, then the modules in the order of their numbers, then the tutorials"
    shutil.rmtree(proc, ignore_errors=True)
    warnings.filterwarnings('ignore', 'Found cells containing imports')
    proc_nbs(cfg.nbs_path, n_workers=0)
    md.mkdir()
    nbs = [proc/'index.ipynb'] + sorted(proc.glob('[0-9]*.ipynb')) + sorted(proc.glob('tutorials/*.ipynb'))
    site = dict(site_name=cfg.title, site_url=cfg.doc_url, repo_url=cfg.git_url, docs_dir=str(md), site_dir=str(cfg.doc_path), edit_uri='',
        theme='readthedocs', use_directory_urls=False, nav=[page(o) for o in nbs])
    (proc/'mkdocs.yml').write_text(json.dumps(site))
    subprocess.run([sys.executable, '-m', 'mkdocs', 'build', '--quiet', '--config-file', str(proc/'mkdocs.yml')], check=True)

if __name__ == '__main__':
    if shutil.which('quarto'): subprocess.run(['nbdev-docs'], check=True, cwd=cfg.config_path)
    else: mkdocs()
    print(f'The documentation is in {cfg.doc_path}/index.html')
