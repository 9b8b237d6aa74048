"Render README.md from nbs/index.ipynb: markdown as it is, code as fenced blocks, without hidden cells and directive lines."
import json, re
from pathlib import Path

root = Path(__file__).parent.parent

def render(nb):
    "The text of README.md for notebook file `nb`"
    def one(cell):
        src = ''.join(cell['source'])
        if cell['cell_type']=='markdown' or not src.strip(): return src.strip()
        return '' if re.search(r'^#\|\s*hide\b', src, re.M) else '```python\n' + re.sub(r'^#\|.*\n', '', src, flags=re.M) + '\n```'
    return '\n\n'.join(filter(None, map(one, json.loads(Path(nb).read_text(encoding='utf-8'))['cells']))) + '\n'

if __name__ == '__main__': (root/'README.md').write_text(render(root/'nbs/index.ipynb'), encoding='utf-8')
