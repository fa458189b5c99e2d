"""Runs a notebook of docs/ and stores its outputs in it. Jupyter is not needed.

    python docs/notebook.py docs/tutorial.ipynb

MkDocs loads this file as a hook (see mkdocs.yml) and shows a notebook as a page, with the stored outputs.
"""

import ast
import base64
import contextlib
import copy
import io
import json
import sys
from pathlib import Path


def run(notebook: dict) -> dict:
    """The notebook with new outputs. The cells run in order, in one namespace."""
    done, scope = copy.deepcopy(notebook), {"__name__": "__main__"}
    for count, cell in enumerate((c for c in done["cells"] if c["cell_type"] == "code"), 1):
        cell["execution_count"] = count
        cell["outputs"] = outputs("".join(cell["source"]), count, scope)
    return done


def outputs(source: str, count: int, scope: dict) -> list[dict]:
    """Runs one cell: what it prints, then the value of its last line if that is an expression."""
    tree, name = ast.parse(source), f"<cell {count}>"
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(tree, name, "exec"), scope)
        value = eval(compile(ast.Expression(last.value), name, "eval"), scope) if last else None
    found = []
    if printed.getvalue():
        lines = printed.getvalue().splitlines(keepends=True)
        found.append({"output_type": "stream", "name": "stdout", "text": lines})
    if value is not None:
        result = {"output_type": "execute_result", "execution_count": count, "metadata": {}}
        found.append(result | {"data": displayed(value)})
    return found


def displayed(value: object) -> dict[str, str]:
    """A value as a notebook shows it, by media type."""
    if hasattr(value, "_repr_html_"):
        return {"text/html": value._repr_html_(), "text/plain": repr(value)}
    if hasattr(value, "_repr_png_"):
        return {"image/png": base64.b64encode(value._repr_png_()).decode()}
    return {"text/plain": repr(value)}


def markdown(notebook: dict) -> str:
    """The notebook as a page."""
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        parts += map(shown, cell.get("outputs", ()))
    return "\n\n".join(parts)


def shown(output: dict) -> str:
    """One output of a cell in Markdown."""
    data = output.get("data", {"text/plain": output.get("text")})
    if "text/html" in data:
        return "".join(data["text/html"])
    if "image/png" in data:
        return f'<p><img alt="Output of the cell above" src="data:image/png;base64,{data["image/png"]}"></p>'
    text = "".join(data["text/plain"]).rstrip("\n")
    return f"```text\n{text}\n```"


def on_files(files, config):
    """MkDocs: notebooks are pages."""
    from mkdocs.structure.files import File

    class Notebook(File):
        def is_documentation_page(self):
            return True

    for file in [file for file in files if file.src_uri.endswith(".ipynb")]:
        files.remove(file)
        files.append(Notebook(file.src_uri, file.src_dir, file.dest_dir, file.use_directory_urls))


def on_page_read_source(page, config):
    """MkDocs: the text of a page; None for pages that are Markdown already."""
    return markdown(json.loads(page.file.content_string)) if page.file.src_uri.endswith(".ipynb") else None


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        done = run(json.loads(path.read_text(encoding="utf-8")))
        path.write_text(json.dumps(done, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
