"""Pages of the documentation that code knows better: the API, the targets, the symptoms.

A hook of mkdocs. It reads sources with griffe, imports nothing but `bevquant_export` and
`bevquant_hybrid`, whose tables it prints, and warns of a public name without a docstring, which
fails a strict build.
"""

from __future__ import annotations

import ast
import logging
import posixpath
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import griffe

ROOT = Path(__file__).parent.parent
SOURCES = {p.parent.name: p.parents[1] for p in sorted(ROOT.glob("*/*/src/*/__init__.py"))}
MUSEUM = ROOT / "tests" / "museum"
PAGES = {
    "tests/museum": "howto/symptoms.md",
    "packages/export/src/bevquant_export/targets": "reference/targets.md",
    "packages/hybrid/src/bevquant_hybrid/operators/tables": "reference/bpu_operators.md",
    **{
        (path / name / "__init__.py").relative_to(ROOT).as_posix(): f"api/{name}.md"
        for name, path in SOURCES.items()
    },
}
"""Generated pages, by the source that Markdown in the repository links."""
log = logging.getLogger("mkdocs.hooks.site")


def exhibits(folder: Path = MUSEUM) -> list[dict[str, str]]:
    """Public failures that the museum's tests hold: thread, symptom, target and rule or cause.

    The docstring of an exhibit is ``owner/repository#number: symptom``; a test's further lines are
    ``Cause: …`` and ``Command: …``. Exhibits of files have their target and rule in ``EXHIBITS``.
    """
    found: list[dict[str, str]] = []
    for path in sorted(folder.glob("test_*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        rules: dict[str, list[str]] = {}
        for node in tree.body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "EXHIBITS":
                assert isinstance(node.value, ast.Dict)
                for key, value in zip(node.value.keys, node.value.values, strict=True):
                    assert key is not None
                    rules[ast.unparse(key)] = list(ast.literal_eval(value))
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef):
                continue
            first, *more = (ast.get_docstring(node) or "").split("\n\n")
            thread, _, symptom = " ".join(first.split()).partition(": ")
            if not re.fullmatch(r"[\w.-]+/[\w.-]+#\d+", thread):
                continue
            row = {"file": path.stem, "thread": thread, "symptom": symptom.rstrip(".")}
            if node.name in rules:
                row["target"], row["rule"] = rules[node.name]
            for line in "\n".join(more).splitlines():
                name, _, said = line.strip().partition(": ")
                if name in ("Cause", "Command"):
                    row[name.lower()] = said
            found.append(row)
    return found


TITLES = {
    "test_dense_files": "Dense files",
    "test_sparse_files": "Sparse files",
    "test_models": "Models, calibration, comparison",
}


def table(head: list[str], rows: list[list[str]]) -> str:
    """A table of Markdown; a bar inside of a cell would end it."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(c.replace("|", "\\|") for c in row) + " |" for row in lines)


def symptoms_page() -> str:
    """Symptom, cause and command of every exhibit of the museum."""
    from bevquant_export.lint import rules

    known = {rule.id: rule for rule in rules()}
    text = [
        "---\nhide: [toc]\n---",
        "# Symptom, cause, command",
        "Failures that others met in public, each made again in small and held by a test: the "
        "linter, the calibration, the export or the comparison names the cause. This page is made "
        "from those tests. Nothing of the threads was copied.",
    ]
    found = exhibits()
    for file in dict.fromkeys(row["file"] for row in found):
        rows = []
        for row in (r for r in found if r["file"] == file):
            if "rule" in row:
                rule = known[row["rule"]]
                cause = f"{rule.id}: {rule.means}"
                command = f"`bevquant-lint FILE --target {row['target']}`: {rule.remedy}"
            else:
                cause, command = row["cause"].rstrip("."), row["command"].rstrip(".")
            place, _, number = row["thread"].partition("#")
            link = f"[{row['thread']}](https://github.com/{place}/issues/{number})"
            rows.append([row["symptom"], cause, command, link])
        text += [
            f"## {TITLES.get(file, file)}",
            table(["Symptom", "Cause", "Command and remedy", "Thread"], rows),
        ]
    return "\n\n".join(text) + "\n"


def targets_page() -> str:
    """What each target wants, from the targets themselves; what each march runs, from its table."""
    from bevquant_export.lint import rules
    from bevquant_export.targets import targets
    from bevquant_hybrid.march import KNOWN, March

    def yes(value: object) -> str:
        return "yes" if value else "no"

    found = targets()
    dense = [(t, form) for t in found if (form := getattr(t, "form", None)) is not None]
    count = {t.name: sum(t.holds(rule) for rule in rules()) for t in found}
    text = [
        "# Targets",
        "This page is made from the targets that the code knows. `find_target(name)` returns one, "
        "`bevquant-lint --rules --target NAME` lists its rules.",
        table(
            ["Target", "Also called", "Engine", "Its sparse encoder", "Rules of the linter"],
            [
                [
                    f"`{t.name}`",
                    ", ".join(f"`{a}`" for a in t.aliases) or "–",
                    t.title,
                    f"`{t.sparse}`" if t.sparse else "–",
                    str(count[t.name]),
                ]
                for t in found
            ],
        ),
        "## Dense files",
        "Forms of QuantizeLinear and DequantizeLinear (QDQ) by target.",
        table(
            ["", *(f"`{t.name}`" for t, _ in dense)],
            [
                ["operator set", *(str(f.opset) for _, f in dense)],
                ["activations", *(f.dtype.__name__ for _, f in dense)],
                ["zero point of activations", *(str(f.zero) for _, f in dense)],
                [
                    "stored weights",
                    *(
                        " or ".join(t.weights)
                        or ("float, behind them a pair" if f.weight == "float" else f.weight)
                        for t, f in dense
                    ),
                ],
                ["bias", *("int32" if f.integer_bias else "float" for _, f in dense)],
                ["scales per channel name their axis", *(yes(f.axis) for _, f in dense)],
                [
                    "a scale per channel in transposed convolutions",
                    *(yes(f.transposed_per_channel) for _, f in dense),
                ],
                ["ReLU clips integers", *(yes(f.integer_relu) for _, f in dense)],
                ["what is not quantized", *("float16" if f.half else "float32" for _, f in dense)],
            ],
        ),
        "## Not run here",
        "What nobody could verify when the target was written. Every manifest says it too.",
        "\n".join(f"- `{t.name}`: {said}" for t in found for said in t.unverified),
        "## Marches",
        "Micro-architectures that `bevquant_hybrid.march.set_march` takes:",
    ]
    chips = dict(re.findall(r"^\s+([A-Z0-9_]+): (.*?)\.?$", March.__doc__ or "", re.MULTILINE))
    rows = [[f"`{n}`", chips.get(n.upper().replace("-", "_"), "")] for n in KNOWN]
    text.append(table(["March", "Chips"], rows))
    text += [
        "What each runs, and under which limits: [BPU operators](bpu_operators.md).",
    ]
    return "\n\n".join(text) + "\n"


def operators_page() -> str:
    """The operators of the marches, as the package's own table has them."""
    from bevquant_hybrid.operators import render_support_table

    return (
        "---\nhide: [navigation, toc]\n---\n\n# BPU operators\n\n"
        "Which operators run on a BPU, in which types and under which limits. "
        "This page is made from the table that `check_model` asks.\n\n"
        + render_support_table(markdown=True)
    )


# The API ----------------------------------------------------------------------------------------


def modules(module: griffe.Module) -> Iterator[griffe.Module]:
    """A package and the public modules below it."""
    yield module
    for inner in module.modules.values():
        if not inner.is_alias and not inner.name.startswith("_"):
            yield from modules(inner)  # type: ignore[arg-type]


def api_pages() -> dict[str, str]:
    """One page a package: every public name where it is first exported, functions before classes.

    Warns of a public class, function or method without a docstring.
    """
    import griffe

    loader = griffe.GriffeLoader(search_paths=[str(path) for path in SOURCES.values()])
    for name in SOURCES:
        loader.load(name)
    loader.resolve_aliases(implicit=False, external=False)
    pages = {}
    for name in SOURCES:
        package = loader.modules_collection[name]
        first = (package.docstring.value if package.docstring else "").split("\n\n")[0]
        text, seen = [f"# {name}", first], set()
        for module in modules(package):
            shown, constants = [], []
            names = map(str, module.exports or [])
            for exported in sorted(names, key=lambda name: (name[:1].isupper(), name)):
                member = module.members.get(exported)
                if member is None or exported.startswith("__"):
                    continue
                try:
                    target = member.final_target if member.is_alias else member
                except griffe.AliasResolutionError:  # torch's own
                    constants.append(exported)
                    continue
                if target.path in seen or target.path.split(".")[0] != name or target.is_module:
                    continue
                seen.add(target.path)
                if target.is_attribute and not target.has_docstring:
                    constants.append(exported)
                    continue
                warn_undocumented(target)
                shown.append(f"::: {module.path}.{exported}")
            if shown or constants:
                text.append(f"## {module.path}" if module is not package else "## Names")
            if constants:
                text.append(
                    "Constants and aliases: " + ", ".join(f"`{c}`" for c in constants) + "."
                )
            text += shown
        pages[name] = "\n\n".join(text) + "\n"
    return pages


def warn_undocumented(shown: Any) -> None:
    """Strict builds fail on warnings."""
    inner = [
        m
        for n, m in shown.members.items()
        if shown.is_class and not n.startswith("_") and not m.is_alias and m.is_function
    ]
    for found in [shown, *inner]:
        # What `extra_repr` returns is torch's to say.
        if not found.has_docstring and found.name != "extra_repr":
            log.warning("%s has no docstring", found.path)


# What mkdocs calls ------------------------------------------------------------------------------


def on_config(config: Any) -> Any:
    """The API's pages in the navigation; sources for mkdocstrings."""
    config["nav"].append({"API": [{name: f"api/{name}.md"} for name in sorted(SOURCES)]})
    handler = config["plugins"]["mkdocstrings"].config["handlers"]["python"]
    handler["paths"] = [str(path) for path in SOURCES.values()]
    return config


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replaces links to a source by links to the page that is made from it."""
    here = posixpath.dirname(page.file.src_uri)

    def generated(link: re.Match[str]) -> str:
        made = PAGES.get(posixpath.normpath(posixpath.join("docs", here, link[1])))
        return f"]({posixpath.relpath(made, here or '.')})" if made else link[0]

    return re.sub(r"\]\(([^)#\s]+)\)", generated, markdown)


def on_page_content(html: str, **_: Any) -> str:
    """No line of a page ends within an option's name, as it could after a hyphen."""
    name = re.compile(r"(?<![\w-])--[a-z][\w-]*")

    def whole(code: re.Match[str]) -> str:
        return name.sub(r'<span class="option">\g<0></span>', code[0])

    return re.sub(r"<code>.*?</code>", whole, html, flags=re.DOTALL)


def on_files(files: Any, config: Any) -> Any:
    """Adds the generated pages."""
    from mkdocs.structure.files import File

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pages = {"howto/symptoms.md": symptoms_page(), "reference/targets.md": targets_page()}
        pages["reference/bpu_operators.md"] = operators_page()
    pages |= {f"api/{name}.md": text for name, text in api_pages().items()}
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))
    return files
