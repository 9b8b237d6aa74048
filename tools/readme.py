"Render README.md from nbs/index.ipynb: markdown with its pictures, code as fenced blocks, without hidden cells and directive lines."
import json, re
from pathlib import Path
try: import tomllib
except ImportError: import tomli as tomllib

root = Path(__file__).parent.parent

def render(nb):
    "The text of README.md for notebook file `nb`"
    def one(cell):
        src = ''.join(cell['source'])
        if cell['cell_type']=='markdown' or not src.strip(): return src.strip().replace('](images/', '](nbs/images/')
        return '' if re.search(r'^#\|\s*hide\b', src, re.M) else '```python\n' + re.sub(r'^#\|.*\n', '', src, flags=re.M) + '\n```'
    return '\n\n'.join(filter(None, map(one, json.loads(Path(nb).read_text(encoding='utf-8'))['cells']))) + '\n'

def badge(label, value):
    "An SVG with two words"
    a,b = (round(6.4*len(o)+12) for o in (label,value))
    def word(o, x): return f'<text x="{x:g}" y="14" text-anchor="middle">{o}</text>'
    return (f'<svg xmlns="http://www.w3.org/2000/svg" width="{a+b}" height="20" role="img" aria-label="{label}: {value}"><clipPath id="r"><rect width="{a+b}" height="20" rx="3"/></clipPath>'
        f'<g clip-path="url(#r)"><path fill="#555" d="M0 0h{a}v20H0z"/><path fill="#3949ab" d="M{a} 0h{b}v20H{a}z"/></g>'
        f'<g fill="#fff" font-family="Verdana,DejaVu Sans,sans-serif" font-size="11">{word(label, a/2)}{word(value, a+b/2)}</g></svg>\n')

def badges():
    "The badges by the name of their files, from pyproject.toml"
    project = tomllib.loads((root/'pyproject.toml').read_text(encoding='utf-8'))['project']
    pythons = re.findall(r'Python :: (3\.\d+)', ' '.join(project['classifiers']))
    return {'license.svg': badge('license', project['license']), 'python.svg': badge('python', f"{pythons[0]} to {pythons[-1]}")}

if __name__ == '__main__':
    for k,v in badges().items(): (root/'nbs/images'/k).write_text(v, encoding='utf-8')
    (root/'README.md').write_text(render(root/'nbs/index.ipynb'), encoding='utf-8')
