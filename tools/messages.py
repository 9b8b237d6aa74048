"What the package raises and warns of, from its code: a page of the documentation."
import ast
from pathlib import Path

root = Path(__file__).resolve().parent.parent
lib = root/'fastai_xla'

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

FILTER = """<input id="filter" type="search" placeholder="Part of a message" aria-label="Show the messages that contain">
<script>
document.getElementById('filter').addEventListener('input', e => {
  const wanted = e.target.value.toLowerCase()
  document.querySelectorAll('.md-typeset tbody tr').forEach(o => o.hidden = !o.textContent.toLowerCase().includes(wanted))
})
</script>"""

def page():
    "Markdown of the page that lists all messages, a table for each chapter"
    chapters,res = {},["# All messages", "> For those who search for a message: what the package raises and warns of. … stands for what is known when it happens", FILTER]
    for o in sorted(lib.rglob('[a-z]*.py')): chapters.setdefault(o.relative_to(lib).parts[0].removesuffix('.py'), []).extend((*m, o.relative_to(lib)) for m in messages(o))
    for k,v in chapters.items():
        if v: res.append(f'## {k}\n\n| message | kind | module |\n|---|---|---|\n' + '\n'.join(f'| {quoted(t)} | {kind} | `{o}` |' for t,kind,o in v))
    return '\n\n'.join(res)+'\n'
