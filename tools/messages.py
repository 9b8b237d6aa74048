"Write what the package raises and warns of into nbs/troubleshooting.ipynb, a cell for each chapter, from the code: `make nbs`."
import ast, json
from pathlib import Path

root = Path(__file__).resolve().parent.parent
lib, page = root/'fastai_xla', root/'nbs'/'troubleshooting.ipynb'

def text(o):
    "The text that an expression makes, with … for what is only known when it runs; '' if it is no text"
    if isinstance(o, ast.Constant): return o.value if isinstance(o.value, str) else ''
    if isinstance(o, ast.JoinedStr): return ''.join(v.value if isinstance(v, ast.Constant) else '…' for v in o.values)
    if isinstance(o, ast.BinOp) and isinstance(o.op, ast.Add): return (text(o.left) or '…')+(text(o.right) or '…') if text(o.left) or text(o.right) else ''
    if isinstance(o, ast.IfExp): return max(text(o.body), text(o.orelse), key=len)
    return ''

def texts(o, functions):
    "The texts of an argument; of a call of a function of the room, those that it returns"
    if isinstance(o, ast.IfExp): return texts(o.body, functions)+texts(o.orelse, functions)
    if text(o): return [text(o)]
    f = functions.get(getattr(o.func, 'id', None)) if isinstance(o, ast.Call) else None
    return [t for r in ast.walk(f) if isinstance(r, ast.Return) and r.value for t in texts(r.value, {})] if f else []

def kind(o):
    "What a call makes: the name of an error, 'warning', or None"
    name = getattr(o.func, 'id', getattr(o.func, 'attr', ''))
    if name=='warn': return 'warning'
    errors = 'Error','Interrupt','NotSteady','NotFinite','XLANotInstalled','XLAVersionMismatch'
    return name if name[:1].isupper() and name.endswith(errors) else None

def messages(path):
    "The messages of a room, as (text, kind), in the order of the text"
    tree = ast.parse(path.read_text(encoding='utf-8'))
    functions = {o.name: o for o in tree.body if isinstance(o, ast.FunctionDef)}
    found = {(' '.join(t.split()), kind(o)) for o in ast.walk(tree) if isinstance(o, ast.Call) and kind(o) for a in o.args for t in texts(a, functions)}
    return sorted(o for o in found if len(o[0].replace('…', ''))>30) # shorter ones are parts of others, or say of a file what it is not

def quoted(s): return s.replace('|', r'\|').replace('<', '&lt;').replace('*', r'\*')

def cells():
    "Title and table of each chapter that has messages, by the id of its cell"
    rooms = {}
    for o in sorted(lib.rglob('[a-z]*.py')): rooms.setdefault(o.relative_to(lib).parts[0].removesuffix('.py'), []).extend((*m, o.relative_to(root)) for m in messages(o))
    return {f'messages-{k}': f'## From `{k}`\n\n| message | kind | room |\n|---|---|---|\n' + '\n'.join(f'| {quoted(t)} | {kind} | `{o}` |' for t,kind,o in v)
            for k,v in rooms.items() if v}

def write():
    nb = json.loads(page.read_text(encoding='utf-8'))
    nb['cells'] = [o for o in nb['cells'] if not o['id'].startswith('messages-')]
    for k,v in cells().items(): nb['cells'].append(dict(cell_type='markdown', id=k, metadata={}, source=v.splitlines(keepends=True)))
    page.write_text(json.dumps(nb, indent=1, ensure_ascii=False)+'\n', encoding='utf-8')

if __name__ == '__main__': write()
