"""The last sections: where every figure comes from, and where to sign."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bevfusion_quant.report import Section
from bevfusion_quant.report._html import Html, tag
from bevfusion_quant.review._checks import exported_files
from bevfusion_quant.review._evidence import frames_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from bevfusion_quant.review._evidence import Evidence
    from bevfusion_quant.review._gather import Gathered

__all__ = ["sign_section", "trail_section"]

DECISIONS = ("Accepted", "Accepted with conditions", "Rejected")
HOW_TO_READ = (
    "Each folder belongs here by the sha256 of the weights that it was made with. The digests are "
    "of the files as this page read them: sha256sum in the folder tells whether they still are."
)


def trail_section(gathered: Gathered, own: Mapping[str, str], command: str) -> Section:
    """Folders with their commands and digests, files, versions.

    Args:
        gathered: What the page is made of.
        own: Versions of the packages that made this page.
        command: The command line that makes it again.
    """
    html = tag(
        "div",
        tag("p", HOW_TO_READ, class_="note about"),
        *(tag("p", note, class_="note") for note in gathered.notes),
        *(_folder(evidence, index) for index, evidence in enumerate(gathered.all)),
        tag("h3", "This page", class_="sub"),
        _command(command, "command-page") if command else None,
        tag("div", _versions(gathered.all, own), class_="columns"),
        class_="trail",
    )
    return Section("trail", "Reproduce", html)


def sign_section() -> Section:
    """Lines to fill in, on the screen or on paper; nothing of it is kept."""
    decisions = [
        tag("label", tag("input", type="radio", name="decision", value=text), tag("span", text))
        for text in DECISIONS
    ]
    lines = [_line(text) for text in ("Name", "Role", "Date", "Signature")]
    html = tag(
        "div",
        tag("fieldset", tag("legend", "Decision"), *decisions, class_="decisions"),
        tag("label", tag("span", "Conditions and remarks"),
            tag("textarea", id="sign-remarks", rows=4, spellcheck="false"), class_="sign-field"),
        tag("div", *lines, class_="sign-lines"),
        tag("p", "What is typed here is printed with the page, and kept nowhere else.",
            class_="note screen-only"),
        class_="sign",
    )  # fmt: skip
    return Section("sign", "Sign", html)


def _line(text: str) -> Html:
    name = f"sign-{text.lower()}"
    given = tag("input", type="text", id=name, autocomplete="off", spellcheck="false")
    return tag("label", tag("span", text), given, class_="sign-field")


def _folder(evidence: Evidence, index: int) -> Html:
    digests = {**evidence.model_digests, **evidence.digests}
    if evidence.summary.export is not None:
        digests |= {f"onnx/{name}": digest for name, digest, _ in exported_files(evidence)}
    rows = [
        tag("tr", tag("th", name, scope="row"), tag("td", tag("code", digest)))
        for name, digest in digests.items()
    ]
    return tag(
        "div",
        tag("h3", f"{evidence.kind}: ", tag("code", str(evidence.folder)), class_="sub"),
        tag("p", frames_text(evidence.frames), class_="note"),
        _command(evidence.command, f"command-{index}") if evidence.command else None,
        tag("table", tag("caption", f"sha256 of files in {evidence.folder}", class_="hidden"),
            tag("tbody", *rows), class_="pairs digests"),
        class_="folder",
    )  # fmt: skip


def _command(command: str, name: str) -> Html:
    return tag(
        "div",
        tag("code", command, id=name, tabindex=0, role="textbox", aria_readonly="true",
            aria_label="Command that repeats it"),
        tag("button", "Copy", type="button", data_copy=name),
        class_="command",
    )  # fmt: skip


def _versions(found: Sequence[Evidence], own: Mapping[str, str]) -> Html:
    """One column where every folder was made with the same versions, else one for each set."""
    sets: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for name, versions in _said(found, own):
        sets.setdefault(tuple(sorted(versions.items())), []).append(name)
    merged: list[tuple[dict[str, str], list[str]]] = []
    for pairs, names in sets.items():
        versions = dict(pairs)
        for there, of in merged:
            if all(there.get(key, value) == value for key, value in versions.items()):
                there |= versions
                of += names
                break
        else:
            merged.append((versions, names))
    packages = sorted({package for versions, _ in merged for package in versions})
    heads = ["Package", *("Version" if len(merged) == 1 else ", ".join(of) for _, of in merged)]
    rows = [
        tag("tr", tag("th", package, scope="row"),
            *(tag("td", versions.get(package, "–")) for versions, _ in merged))
        for package in packages
    ]  # fmt: skip
    return tag(
        "table",
        tag("caption", "Versions"),
        tag("thead", tag("tr", *(tag("th", head, scope="col") for head in heads))),
        tag("tbody", *rows),
        class_="pairs",
    )


def _said(
    found: Sequence[Evidence], own: Mapping[str, str]
) -> Iterator[tuple[str, Mapping[str, str]]]:
    for evidence in found:
        yield evidence.folder.name, evidence.summary.versions
    yield "this page", own
