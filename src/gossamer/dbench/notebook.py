"""A bench's output for a notebook: ``run = gossamer.dbench.read("runs/quickstart")``, and what it holds as rows, arrays and figures."""

from __future__ import annotations

import html
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from plotly import graph_objects

from gossamer.dbench import analysis, report
from gossamer.dbench.failures import NONE
from gossamer.dbench.figures import Figure
from gossamer.dbench.results import flat, results
from gossamer.dbench.store import FILE, FINISHED, ProfileRow, Run, Store
from gossamer.dbench.summary import Summary
from gossamer.errors import GossamerError
from gossamer.members.outages import Attendance


@dataclass(frozen=True)
class Profiles:
    """What was looked at in one run, just before parameters were averaged.

    - ``norms [looks, replicas, tensors]``: the L2 norm of each tensor on each replica; nan while a replica was away.
    - ``dispersion[measure] [looks, tensors]``: gini, iod, cv, qcd.
    - ``steps``, ``epochs``, ``consensus_distance``, ``bytes``: ``[looks]``. ``tensors``: the names.
    """

    method: str
    replicas: int
    seed: int
    failures: str
    tensors: tuple[str, ...]
    steps: np.ndarray
    epochs: np.ndarray
    norms: np.ndarray
    dispersion: dict[str, np.ndarray]
    consensus_distance: np.ndarray
    bytes: np.ndarray


class Results:
    """The output folder of a bench, as it was when this was made; also while the bench runs."""

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        store = Store(self.folder / FILE)
        self.spec, self.metric = store.spec(), store.meta("metric")["name"]
        self._runs, self._rows, self._all = analysis.load(store), results(store), store.runs()
        self._figures: dict[str, Figure] = {}
        self._summary: Summary | None = None
        if self._runs:
            self._figures = {figure.id: figure for figure in report.all_figures(store, self._runs)}
            self._summary = report.summarized(store, self._runs)
        store.close()

    # --- As data -----------------------------------------------------------------------------------------------------------

    def table(self) -> list[dict[str, Any]]:
        """A row for each run, with the keys of docs/results.md: ``pandas.DataFrame(run.table())``."""
        return flat(self._rows)

    def curves(self) -> list[dict[str, Any]]:
        """A row for each epoch of each finished run. ``epoch`` counts from 0, ``step`` is the number of steps done, ``value`` is the
        metric of the averaged model."""
        return [
            {**_cell(data.run), "metric": self.metric, **asdict(record), "predicted_seconds": data.seconds_at(record.step)}
            for data in self._runs
            for record in data.epochs
        ]

    def profiles(self, method: str | None = None, replicas: int | None = None, seed: int | None = None) -> list[Profiles]:
        """The looks of each run, or of those of a method, a number of replicas, a seed; empty if the spec has no profile."""
        for what, value, known in (
            ("method", method, [run.method for run in self._all]),
            ("replicas", replicas, [run.replicas for run in self._all]),
            ("seed", seed, [run.seed for run in self._all]),
        ):
            if value is not None and value not in known:
                there = ", ".join(map(str, dict.fromkeys(known)))
                raise GossamerError(f"profiles({what}={value!r}): {self.folder} has no such run; there are {there}")
        asked = {"method": method, "replicas": replicas, "seed": seed}
        store = Store(self.folder / FILE)
        try:
            chosen = [r for r in self._all if all(value in (None, getattr(r, key)) for key, value in asked.items())]
            return [self._profiles(store, run, looks) for run in chosen if (looks := store.profiles(run))]
        finally:
            store.close()

    def _profiles(self, store: Store, run: Run, looks: list[ProfileRow]) -> Profiles:
        norms = np.full((len(looks), run.replicas, len(run.tensors)), np.nan, dtype=np.float32)
        if any(len(look.norms) < run.replicas for look in looks):
            there = Attendance(run.replicas, self.spec.outages(run.cell), self._steps_per_epoch(store, run.replicas))
        for row, look in zip(norms, looks, strict=True):
            row[slice(None) if len(look.norms) == run.replicas else list(there.members(look.step))] = look.norms
        return Profiles(
            **_cell(run),
            tensors=run.tensors,
            steps=np.array([look.step for look in looks]),
            epochs=np.array([look.epoch for look in looks]),
            norms=norms,
            dispersion=analysis.dispersion_of(looks),
            consensus_distance=np.array([look.consensus_distance for look in looks], dtype=np.float64),
            bytes=np.array([look.bytes for look in looks]),
        )

    def _steps_per_epoch(self, store: Store, replicas: int) -> int:
        for run in self._all:
            if run.replicas == replicas and (epochs := store.epochs(run.id)):
                return epochs[0].step
        raise GossamerError(
            f"{self.folder}: which of {replicas} replicas were away is known when a run has finished its first epoch"
        )

    # --- As figures --------------------------------------------------------------------------------------------------------

    @property
    def figures(self) -> dict[str, str]:
        """The names of the report's figures, and what they show."""
        return {name: figure.title for name, figure in self._figures.items()}

    def figure(self, name: str, **choice: object) -> graph_objects.Figure:
        """One of the report's figures, for plotly: by its name, or the metric's for the curve over epochs. ``choice``: what the report's
        boxes choose, such as ``replicas=16, measure="Gini coefficient"``; what is left out is as the report first shows it."""
        figure = self.plain(name)
        chosen = figure.choose({key: str(value) for key, value in choice.items()})
        layout = {"title": {"text": figure.title}, "template": "plotly_white", **chosen["layout"]}
        return graph_objects.Figure(chosen["data"], layout)

    def plain(self, name: str) -> Figure:
        """The same as plain data, with all that can be chosen."""
        found = self._figures.get("epochs" if name == self.metric else name)
        if found is None:
            there = ", ".join(self._figures) or "none: no run is finished, or all have diverged"
            raise GossamerError(f"{self.folder} has no figure {name!r}; there are {there}")
        return found

    # --- At a glance -------------------------------------------------------------------------------------------------------

    @property
    def summary(self) -> Summary:
        """The report's table: ``summary.markdown()``, ``summary.latex()``."""
        if self._summary is None:
            raise GossamerError(f"{self.folder} has no finished run yet; finish one with: gossamer bench")
        return self._summary

    def __repr__(self) -> str:
        done = sum(run.status in FINISHED for run in self._all)
        names = ", ".join(method.name for method in self.spec.methods)
        sizes = ", ".join(map(str, self.spec.replicas))
        failures = "" if set(self.spec.failures) <= {NONE} else f"; failures: {', '.join(self.spec.failures)}"
        return (
            f"{self.spec.name} ({self.folder}): {done} of {len(self._all)} runs are finished; metric: {self.metric}\n"
            f"methods: {names}; replicas: {sizes}; seeds: {', '.join(map(str, self.spec.seeds))}{failures}\n"
            f"figures: {', '.join(self._figures) or 'none yet'}"
        )

    def _repr_html_(self) -> str:
        first, *rest = repr(self).splitlines()
        lines = "".join(f"<br>{html.escape(line)}" for line in rest)
        return f"<p><strong>{html.escape(first)}</strong>{lines}</p>{self._summary.html() if self._summary else ''}"


def _cell(run: Run) -> dict[str, Any]:
    return {"method": run.method, "replicas": run.replicas, "seed": run.seed, "failures": run.failures}
