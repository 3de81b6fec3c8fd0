"""The table of final metrics, by method and scale: for the report, for a notebook, for a paper."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

from gossamer.dbench import analysis
from gossamer.dbench.analysis import Final, RunData
from gossamer.dbench.findings import FEW, shown


@dataclass(frozen=True)
class Summary:
    """Rows begin with the method's name. ``best``: row and column of what is ahead of all others at a scale."""

    caption: str
    head: list[str]
    rows: list[list[str]]
    best: set[tuple[int, int]]

    def html(self) -> str:
        head = "".join(f"<th>{html.escape(cell)}</th>" for cell in self.head)
        rows = "".join(f"<tr>{''.join(self._cell(r, c) for c in range(len(row)))}</tr>" for r, row in enumerate(self.rows))
        return (
            f"<p>{html.escape(self.caption)}</p><div class='scroll'><table><thead><tr>{head}</tr></thead>"
            f"<tbody>{rows}</tbody></table></div>"
        )

    def _cell(self, r: int, c: int) -> str:
        text, kind = html.escape(self.rows[r][c]), "td" if c else "th"
        return f"<{kind}>{f'<strong>{text}</strong>' if (r, c) in self.best else text}</{kind}>"

    def markdown(self) -> str:
        def line(cells: Sequence[str]) -> str:
            return f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |"

        rows = [
            [f"**{cell}**" if (r, c) in self.best else cell for c, cell in enumerate(row)] for r, row in enumerate(self.rows)
        ]
        lines = [line(self.head), line(["---", *["---:"] * (len(self.head) - 1)]), *map(line, rows)]
        return "\n".join([*lines, "", self.caption, ""])

    def latex(self) -> str:
        """A table environment; needs the package booktabs."""
        rows = [
            [rf"\textbf{{{_latex(cell)}}}" if (r, c) in self.best else _latex(cell) for c, cell in enumerate(row)]
            for r, row in enumerate(self.rows)
        ]
        lines = [rf"{' & '.join(row)} \\" for row in rows]
        return "\n".join(
            [
                r"\begin{table}",
                r"\centering",
                rf"\caption{{{_latex(self.caption)}}}",
                r"\medskip",  # article puts no space below a caption
                rf"\begin{{tabular}}{{l{'r' * (len(self.head) - 1)}}}",
                r"\toprule",
                rf"{' & '.join(map(_latex, self.head))} \\",
                r"\midrule",
                *lines,
                r"\bottomrule",
                r"\end{tabular}",
                r"\end{table}",
                "",
            ]
        )


_LATEX = {
    **{mark: f"\\{mark}" for mark in "&%$#_{}"},
    **{
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "<": r"\textless{}",
        ">": r"\textgreater{}",
    },
    **{"±": r"$\pm$", "–": "--", "−": "$-$", "×": r"$\times$", "“": "``", "”": "''"},
}


def _latex(text: str) -> str:
    return "".join(_LATEX.get(mark, mark) for mark in text)


def summary(runs: Sequence[RunData], metric: str, higher: bool, more: str = "") -> Summary:
    """``more``: what else the caption says."""
    sizes = analysis.scales(runs)
    finals = {(f.method, f.replicas): f for f in analysis.finals(runs, higher)}
    best = {n: _best([f for f in finals.values() if f.replicas == n], higher) for n in sizes}
    rows, marked = [], set()
    for r, method in enumerate(analysis.methods(runs)):
        row = [method]
        for c, n in enumerate(sizes):
            final = finals.get((method, n))
            text = "–" if final is None else shown(final.value)
            if final is not None and final.diverged:
                text = f"{final.diverged} diverged" if math.isnan(final.value.mean) else f"{text} ({final.diverged} diverged)"
            if final is not None and final is best[n]:
                marked.add((r, c + 1))
            row.append(text)
        last = finals.get((method, sizes[-1]))
        worst = "–" if last is None else shown(last.worst_replica)
        received = "–" if last is None or math.isnan(last.bytes) else f"{last.bytes / 1e6:.3g}"
        rows.append([*row, worst, received])
    largest = f"n={sizes[-1]}"
    caption = (
        f"Final {metric} of the averaged model on test data, mean ± 95 % interval over seeds; "
        f"{'higher' if higher else 'lower'} is better.{more} Bold: ahead of all others by more than the intervals."
    )
    head = ["method", *(f"n={n}" for n in sizes), f"worst replica, {largest}", f"MB per replica, {largest}"]
    return Summary(caption, head, rows, marked)


def _best(finals: list[Final], higher: bool) -> Final | None:
    """The one whose interval lies beyond those of all others. A method that diverged on some seed is not the best one, whatever the others
    gave."""
    whole = [f for f in finals if not f.diverged and not math.isnan(f.value.mean)]
    best = (max if higher else min)(whole, key=lambda f: f.value.mean, default=None)
    if best is None or best.value.seeds < FEW:
        return None
    others = [f.value for f in whole if f is not best]
    ahead = all(best.value.low > o.high for o in others) if higher else all(best.value.high < o.low for o in others)
    return best if ahead and others else None
