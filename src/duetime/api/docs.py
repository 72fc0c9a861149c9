"""The page at /docs: the OpenAPI document as HTML. It is one file and loads nothing else.

Its policy (Content-Security-Policy) allows exactly the style and the script of this module, by their hashes.
"""

from __future__ import annotations

import json
import re
from base64 import b64encode
from functools import cache
from hashlib import sha256
from html import escape
from typing import Any

from duetime.api.openapi import openapi
from duetime.domain.flow_status import FlowState
from duetime.domain.timer import Outcome, State, Verdict

__all__ = ["docs_page", "docs_policy"]

Json = dict[str, Any]

# Replaced in the browser by the address of the page, so that the examples can be copied and run.
_SERVER = "http://127.0.0.1:8463"


def docs_policy() -> str:
    """Nothing else is loaded or run, no other page may embed this one, and no form of it leads anywhere."""
    return (
        f"default-src 'none'; style-src {_hash(_STYLE)}; script-src {_hash(_SCRIPT)}; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _hash(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"


@cache
def docs_page() -> bytes:
    document = openapi()
    schemas = document["components"]["schemas"]
    sections = [_section(tag, document) for tag in document["tags"]]
    shapes = [_shape(name, schema) for name, schema in schemas.items() if schema.get("properties")]
    links = "".join(
        f'<li><a href="#{operation["operationId"]}">{escape(path.removeprefix("/api/v1/"))}</a></li>'
        for path, operation in _operations(document)
    )
    page = _PAGE.format(
        version=escape(document["info"]["version"]),
        introduction=_prose(document["info"]["description"]),
        links=links,
        sections="".join(sections),
        shapes="".join(shapes),
        style=_STYLE,
        script=_SCRIPT,
    )
    return page.encode()


def _operations(document: Json) -> list[tuple[str, Json]]:
    return [(path, operation) for path, item in document["paths"].items() for operation in item.values()]


def _section(tag: Json, document: Json) -> str:
    parts = [
        _operation(path, operation, document)
        for path, operation in _operations(document)
        if tag["name"] in operation["tags"]
    ]
    return f"<h2>{escape(tag['name'].capitalize())}</h2><p>{escape(tag['description'])}</p>{''.join(parts)}"


def _operation(path: str, operation: Json, document: Json) -> str:
    method = "POST" if "requestBody" in operation else "GET"
    parts = [
        f'<article id="{operation["operationId"]}"><h3>{escape(operation["summary"])}</h3>',
        f"<p class=path><b>{method}</b> <code>{escape(path)}</code></p>",
        _prose(operation.get("description", "")),
        f"<pre class=example>{escape(_curl(method, path, operation))}</pre>",
    ]
    if method == "POST":
        request = operation["requestBody"]["content"]["application/json"]["schema"]
        answer = operation["responses"]["200"]["content"]["application/json"]["schema"]
        parts.append(_fields("Request", request, document))
        parts.append(_fields("Answer", answer, document))
    parts.append(_answers(operation, document))
    return "".join(parts) + "</article>"


def _curl(method: str, path: str, operation: Json) -> str:
    if method == "GET":
        return f"curl {_SERVER}{path}"
    example = operation["requestBody"]["content"]["application/json"]["example"]
    body = json.dumps(example, ensure_ascii=False)
    return f"curl {_SERVER}{path} -H 'Content-Type: application/json' -d '{body}'"


def _fields(title: str, reference: Json, document: Json) -> str:
    name = reference["$ref"].rpartition("/")[2]
    schema = document["components"]["schemas"][name]
    if not schema.get("properties"):
        return ""
    return f"<h4>{title}</h4>{_table(schema)}"


def _table(schema: Json) -> str:
    required = set(schema.get("required", ()))
    rows = [
        f"<tr><td><code>{escape(name)}</code>{' <small>required</small>' if name in required else ''}</td>"
        f"<td>{_type(part)}</td><td>{_description(part)}</td></tr>"
        for name, part in schema["properties"].items()
    ]
    return f"<table class=fields>{''.join(rows)}</table>"


def _shape(name: str, schema: Json) -> str:
    description = f"<p>{_inline(schema['description'])}</p>" if "description" in schema else ""
    return f'<article id="shape-{name}"><h3>{escape(name)}</h3>{description}{_table(schema)}</article>'


def _type(part: Json) -> str:
    if "$ref" in part:
        name = part["$ref"].rpartition("/")[2]
        return f'<a href="#shape-{name}">{escape(name)}</a>' if name not in _ENUMS else "string"
    if "anyOf" in part:
        return " or ".join(_type(choice) for choice in part["anyOf"])
    kind = part.get("type", "any JSON")
    if kind == "array" or kind == ["array", "null"]:
        return f"list of {_type(part['items'])}" + (" or null" if isinstance(kind, list) else "")
    return escape(" or ".join(kind) if isinstance(kind, list) else kind)


_ENUMS = {kind.__name__: [member.value for member in kind] for kind in (FlowState, Outcome, State, Verdict)}


def _description(part: Json) -> str:
    texts = [_inline(part["description"])] if "description" in part else []
    choices = [part, *part.get("anyOf", ())]
    texts += [_inline(choice["description"]) for choice in choices[1:] if "description" in choice]
    for values in (_ENUMS.get(choice.get("$ref", "").rpartition("/")[2]) for choice in choices):
        if values is None:
            continue
        texts.append("One of " + ", ".join(f"<code>{escape(value)}</code>" for value in values) + ".")
    if "minimum" in part and "maximum" in part:
        texts.append(f"{part['minimum']:,} to {part['maximum']:,}.")
    if "default" in part:
        texts.append(f"Default <code>{escape(json.dumps(part['default']))}</code>.")
    if "examples" in part:
        texts.append(f"E.g. <code>{escape(json.dumps(part['examples'][0], ensure_ascii=False))}</code>.")
    return " ".join(texts)


def _answers(operation: Json, document: Json) -> str:
    rows = []
    for status, response in operation["responses"].items():
        if "$ref" in response:
            response = document["components"]["responses"][response["$ref"].rpartition("/")[2]]
        rows.append(f"<tr><td>{status}</td><td>{_inline(response['description'])}</td></tr>")
    return f"<details><summary>Statuses</summary><table>{''.join(rows)}</table></details>"


def _prose(text: str) -> str:
    return "".join(f"<p>{_inline(paragraph)}</p>" for paragraph in text.strip().split("\n\n") if paragraph)


def _inline(text: str) -> str:
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text, quote=False))


_STYLE = """
:root { color-scheme: light dark; --ink: #1c2024; --soft: #5b6570; --line: #dde2e7; --field: #f4f6f8; --link: #0b62c4; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e8ec; --soft: #98a3ad; --line: #333a41; --field: #1d2227; --link: #6fb1ff; }
  body { background: #14181c; }
}
* { box-sizing: border-box; }
body { margin: 0; color: var(--ink); font: 16px/1.55 system-ui, sans-serif; display: grid;
  grid-template-columns: 15rem minmax(0, 52rem); gap: 0 3rem; padding: 0 2rem; }
nav { position: sticky; top: 0; align-self: start; max-height: 100vh; overflow: auto; padding: 2rem 0; }
nav ul { list-style: none; margin: 0; padding: 0; font-size: .9rem; }
nav li { margin: .2rem 0; }
a { color: var(--link); text-decoration: none; } a:hover, a:focus { text-decoration: underline; }
main { padding: 2rem 0 6rem; }
h1 { margin: 0 0 1rem; } h2 { margin: 3.5rem 0 0; } h3 { margin: 0; } h4 { margin: 1.5rem 0 .3rem; }
article { border-top: 1px solid var(--line); margin-top: 2rem; padding-top: 1.5rem; }
small, .path { color: var(--soft); }
code, pre { font: .87em/1.5 ui-monospace, Menlo, Consolas, monospace; }
code { background: var(--field); padding: .1em .3em; border-radius: 3px; overflow-wrap: anywhere; }
pre { background: var(--field); padding: .8rem 5rem .8rem 1rem; border-radius: 6px; white-space: pre-wrap;
  overflow-wrap: anywhere; position: relative; }
pre button { position: absolute; top: .4rem; right: .4rem; font: .8rem system-ui; }
table { border-collapse: collapse; width: 100%; font-size: .92rem; }
td { border-top: 1px solid var(--line); padding: .4rem .8rem .4rem 0; vertical-align: top; }
td:first-child { white-space: nowrap; } td:nth-child(2) { color: var(--soft); }
summary { cursor: pointer; color: var(--soft); margin-top: 1rem; }
@media (max-width: 50rem) {
  body { display: block; padding: 0 1rem; }
  nav { position: static; max-height: none; }
  .fields td { display: block; border: 0; padding: 0; }
  .fields td:first-child { border-top: 1px solid var(--line); padding-top: .4rem; white-space: normal; }
  .fields td:last-child { padding-bottom: .4rem; }
}
"""

_SCRIPT = """
for (const pre of document.querySelectorAll("pre.example")) {
  const text = pre.textContent.replace("%s", location.origin);
  const button = document.createElement("button");
  button.textContent = "copy";
  button.onclick = async () => { await navigator.clipboard.writeText(text); button.textContent = "copied"; };
  pre.textContent = text;
  pre.append(button);
}
""".replace("%s", _SERVER)

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>Duetime API</title><style>{style}</style></head>
<body><nav><ul>{links}<li><a href="#shapes">Shapes</a></li><li><a href="/openapi.json">openapi.json</a></li></ul></nav>
<main><h1>Duetime API <small>{version}</small></h1>{introduction}{sections}
<h2 id="shapes">Shapes</h2><p>The objects that requests and answers are made of.</p>{shapes}</main>
<script>{script}</script></body></html>
"""
