"""Finished folders: their content, and those that measured a run, found by weights' digests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bevfusion_quant._errors import InputError
from bevfusion_quant.pages import PAGE_DATA, Section, read_sections
from bevfusion_quant.run import (
    CONFIG_FILE,
    DIGESTS_FILE,
    SUMMARY_FILE,
    RunSettings,
    RunSummary,
    read_digests,
    read_settings,
    read_summary,
    refuse_version,
)
from bevquant_quantizers.documents import DocumentError, sha256

_FOUND = ("qat", "bpu", "sensitivity", "export")  # kinds whose summary has a field of that name


@dataclass(frozen=True, eq=False)
class Evidence:
    """One finished folder.

    Attributes:
        folder: Its path.
        kind: `RunSettings.kind`; "simulation" if an evaluation ran integers.
        settings: Its settings.
        summary: Its results.
        sections: Sections of its page by key, from their data.
        digests: sha256 of config.json, summary.json and page.json, as read.
    """

    folder: Path
    kind: str
    settings: RunSettings
    summary: RunSummary
    sections: Mapping[str, Section]
    digests: Mapping[str, str]

    @property
    def command(self) -> str:
        """The command line that repeats it."""
        return self.summary.command

    @property
    def frames(self) -> tuple[str, ...]:
        """Names of its frames."""
        return self.summary.frame_names

    @property
    def model_digests(self) -> Mapping[str, str]:
        """sha256 of the model's files, for a run that holds one."""
        return self.settings.sha256 or {}


def read_config(folder: Path) -> RunSettings | None:
    """Settings of a folder of this program; None for any other folder."""
    try:
        return read_settings(folder)
    except DocumentError:
        return None


def read_evidence(folder: Path) -> Evidence:
    """Read a finished folder's settings, summary and page data.

    Raises:
        InputError: Not such a folder, a damaged one, or one of another version.
    """
    config = read_config(folder)
    if config is None:
        raise InputError(
            f"{folder} is no run of bevfusion-quant (no {CONFIG_FILE} of ours in it): give a "
            "folder that one of its commands has written"
        )
    try:
        refuse_version(f"{CONFIG_FILE} is of", config.version)
        summary = read_summary(folder)
        kind = config.kind
        if kind in _FOUND and getattr(summary, kind) is None:
            raise ValueError(
                f"{SUMMARY_FILE} lacks {kind!r}, the results of a folder of kind {kind}"
            )
        digests = _checked(folder)
        sections = read_sections(folder / PAGE_DATA)
    except (OSError, ValueError) as error:
        raise InputError(
            f"{folder} cannot be put on a page: {error}: run its command again, or take the folder "
            "out of --runs"
        ) from error
    if kind == "evaluation" and (summary.integers is not None or config.for_bpu):
        kind = "simulation"
    return Evidence(folder, kind, config, summary, sections, digests)


def _checked(folder: Path) -> dict[str, str]:
    """Digests of the page's source files, checked against those of the run."""
    known = read_digests(folder)
    if known is None:
        raise ValueError(
            f"it has no {DIGESTS_FILE}, so its figures cannot be checked; it is from an "
            "earlier version"
        )
    found = {}
    for name in (CONFIG_FILE, SUMMARY_FILE, PAGE_DATA):
        found[name] = sha256(folder / name)
        if known.get(name) != found[name]:
            raise ValueError(f"{name} is not the file that the run wrote: it was changed")
    return found


def frames_text(frames: Sequence[str]) -> str:
    """Number and names of the frames."""
    if not frames:
        return "no frames"
    ends = frames[0] if len(frames) == 1 else f"{frames[0]} … {frames[-1]}"
    return f"{len(frames):,} frame{'s' * (len(frames) != 1)}, {ends}"


# Of two kinds that answer the same question, the first is taken where there is one.
_SLOTS = {
    "evaluation": ("simulation", "evaluation"),
    "sensitivity": ("sensitivity",),
    "export": ("export",),
}
_TAKEN = {"comparison", *(kind for kinds in _SLOTS.values() for kind in kinds)}


@dataclass(frozen=True, eq=False)
class Measured:
    """A run that holds a model, and its measurements: one folder of each kind."""

    run: Evidence
    evaluation: Evidence | None = None
    sensitivity: Evidence | None = None
    export: Evidence | None = None

    @property
    def all(self) -> tuple[Evidence, ...]:
        """All folders, the run first."""
        found = (self.run, self.evaluation, self.sensitivity, self.export)
        return tuple(evidence for evidence in found if evidence is not None)


@dataclass(frozen=True, eq=False)
class Gathered:
    """All sources of a page: the run to be signed, and those that were named to stand beside it.

    `comparison` is a folder of `compare` with the run. Notes name folders that fit and were not
    taken.
    """

    main: Measured
    qat: Measured | None = None
    bpu: Measured | None = None
    comparison: Evidence | None = None
    notes: tuple[str, ...] = ()

    @property
    def measured(self) -> tuple[Measured, ...]:
        """Runs that hold a model, each with its measurements."""
        return tuple(one for one in (self.main, self.qat, self.bpu) if one is not None)

    @property
    def all(self) -> tuple[Evidence, ...]:
        """All folders, each once."""
        found = [evidence for one in self.measured for evidence in one.all]
        return tuple(found if self.comparison is None else [*found, self.comparison])


@dataclass
class _Finder:
    """Selects folders and records those not taken."""

    folders: Sequence[Path]
    taken: Sequence[Evidence]
    notes: list[str] = field(default_factory=list)

    def measured(self, run: Evidence) -> Measured:
        """The newest folder of each kind with the weights of this run."""
        candidates = [read_evidence(f) for f in self._of(run)]
        found: dict[str, Evidence] = {}
        for slot, kinds in _SLOTS.items():
            named = [e for e in self.taken if e.kind in kinds and _is_of(e.settings, run)]
            if len(named) > 1:
                raise InputError(
                    f"--take names two of a kind, {named[0].folder} and {named[1].folder}: name one"
                )
            there = named or next(
                (alike for kind in kinds if (alike := [e for e in candidates if e.kind == kind])),
                [],
            )
            others = [e for e in candidates if e.kind in kinds and e not in there]
            newest = self._newest(there, others)
            found |= {} if newest is None else {slot: newest}
        return Measured(run, **found)

    def _newest(self, there: Sequence[Evidence], others: Sequence[Evidence]) -> Evidence | None:
        """The last written of `there`, with a note about all the others."""
        newest = max(there, key=lambda e: _written(e.folder), default=None)
        if newest is None:
            return None
        left = [str(e.folder) for e in (*others, *there) if str(e.folder) != str(newest.folder)]
        if left:
            self.notes.append(f"{newest.folder} was taken, not {', '.join(left)}")
        return newest

    def comparison(self, run: Evidence) -> Evidence | None:
        named = [e for e in self.taken if e.kind == "comparison"]
        for one in named:
            if not _compares(one.settings, run):
                raise InputError(
                    f"--take {one.folder}: it compares other runs than {run.folder}: compare "
                    "again with it, or leave it out"
                )
        there = named or [
            read_evidence(folder)
            for folder in self.folders
            if (settings := read_config(folder)) is not None and _compares(settings, run)
        ]
        return self._newest(there, [])

    def _of(self, run: Evidence) -> Iterable[Path]:
        for folder in self.folders:
            settings = read_config(folder)
            if settings is None or settings.kind not in _SLOTS:
                continue
            if _is_of(settings, run):
                yield folder
            elif _same(Path(str(settings.evaluates)), run.folder):
                self.notes.append(
                    f"{folder} was made of other weights than those that {run.folder} holds now: "
                    "not taken"
                )


def gather(
    run: Path,
    runs: Path,
    *,
    qat: Path | None = None,
    bpu: Path | None = None,
    take: Sequence[Path] = (),
) -> Gathered:
    """Find the measurements of a run.

    A folder belongs to a run if the digests in its config.json equal those of the run's weights. Of
    several folders, the newest is taken, and one of `simulate` before one of `evaluate`.

    Args:
        run: The run to be signed: a folder that holds a model.
        runs: Folder of all runs, searched for evaluations and other measurements.
        qat: A run of `qat`, shown beside.
        bpu: A run of `ptq --target bpu`, shown beside.
        take: Folders to take instead of the newest of their kind.

    Raises:
        InputError: A folder is no run, of another kind, damaged, or of another model.
    """
    main = _read_model(run, "--run", ("ptq", "qat", "bpu"))
    trained = None if qat is None else _read_model(qat, "--qat", ("qat",))
    chip = None if bpu is None else _read_model(bpu, "--bpu", ("bpu",))
    models = [one for one in (main, trained, chip) if one is not None]
    for other, option in (trained, "--qat"), (chip, "--bpu"):
        if other is not None:
            _check_alike(main, other, option)
    given = [read_evidence(folder) for folder in take]
    for evidence in given:
        if evidence.kind not in _TAKEN:
            raise InputError(
                f"--take {evidence.folder} is of kind {evidence.kind}: name folders of evaluate, "
                "simulate, sensitivity, export or compare"
            )
        if evidence.kind == "comparison" or any(_is_of(evidence.settings, m) for m in models):
            continue
        of = evidence.settings.evaluates or "no run"
        raise InputError(
            f"--take {evidence.folder}: it is of {of} with other weights than those of "
            f"{', '.join(str(m.folder) for m in models)}: leave it out, or make it again"
        )
    folders = sorted(p for p in runs.iterdir() if p.is_dir()) if runs.is_dir() else []
    finder = _Finder([f for f in folders if not f.name.startswith(".")], given)
    return Gathered(
        finder.measured(main),
        None if trained is None else finder.measured(trained),
        None if chip is None else finder.measured(chip),
        finder.comparison(main),
        tuple(finder.notes),
    )


def _read_model(folder: Path, option: str, kinds: tuple[str, ...]) -> Evidence:
    """Read a run of one of these kinds, and check that its files are unchanged."""
    evidence = read_evidence(folder)
    if evidence.kind not in kinds:
        of = evidence.settings.evaluates
        what_it_is = f"{evidence.kind} of {of}" if of else evidence.kind
        hint = f"give {option} {of}" if of else f"give one of {', '.join(kinds)}"
        raise InputError(f"{option} {folder} is of kind {what_it_is}: {hint}")
    if not evidence.model_digests:
        raise InputError(
            f"{option} {folder} has no digests of its files, so its measurements cannot be "
            "found: quantize again with this version"
        )
    for name, digest in evidence.model_digests.items():
        path = folder / name
        if not path.is_file() or sha256(path) != digest:
            raise InputError(
                f"{path} is missing or was changed since the run wrote it, so the run's "
                "measurements do not apply; quantize again"
            )
    return evidence


def _check_alike(main: Evidence, other: Evidence, option: str) -> None:
    """Refuse a run whose float model is not that of the main run."""
    first, second = main.settings, other.settings
    for key in ("model", "config", "weights", "seed"):
        one, two = getattr(first, key), getattr(second, key)
        # The same weights may lie at several places, and a seed decides random ones alone.
        alike = one == two or (key == "weights" and _same_bytes(one, two))
        if not alike and not (key == "seed" and first.weights):
            raise InputError(
                f"{option} {other.folder}: its {key} is {two!r}, that of {main.folder} is {one!r}: "
                "the two are not of one float model; name runs of the same weights"
            )


def _same_bytes(one: str | None, two: str | None) -> bool:
    """Whether two paths of weights have equal content; False if a file is gone."""
    paths = [Path(str(name)) for name in (one, two)]
    return all(path.is_file() for path in paths) and len({sha256(path) for path in paths}) == 1


def _is_of(settings: RunSettings, run: Evidence) -> bool:
    return bool(run.model_digests) and settings.run_sha256 == run.model_digests


def _compares(settings: RunSettings, run: Evidence) -> bool:
    return any(one.sha256 == run.model_digests for one in settings.compares or ())


def _same(one: Path, other: Path) -> bool:
    return one.exists() and other.exists() and one.samefile(other)


def _written(folder: Path) -> tuple[int, str]:
    """Sort key: time of writing, then the name, so the choice is always the same."""
    return (folder / SUMMARY_FILE).stat().st_mtime_ns, folder.name
