"""The runtime model against published iteration times ("From Promise to Practice", Figure 6): fitted on each cluster's two smaller
sizes, with one set of five unknowns for all methods (and one more for SGP), it predicts the largest.

    python -m benchmarks.published_table             # or --table YOURS.toml; the format is in gossamer/runtime/fit.py
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.timing import console, verdict
from gossamer.runtime import fit
from gossamer.runtime.commands import fit_table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", type=Path)
    args = parser.parse_args()
    met, errors = True, []
    for table in fit.load(args.table) if args.table else fit.published():
        with console.status(f"fitting {table.name}"):
            found = fit.fit(table)
        console.print(fit_table(found))
        errors += [abs(cell.error) for cell in found.cells if not cell.fitted]
        met &= verdict(f"{table.name}: mean absolute error of the predicted, in %", found.mean_error(False) * 100, 15)
        largest = max(table.times)
        measured, predicted = found.ranking(largest)
        met &= verdict(f"{table.name}: ranking of {largest} workers is right", float(measured == predicted), 1, at_most=False)
    met &= verdict("all: mean absolute error of the predicted, in %", 100 * sum(errors) / max(1, len(errors)), 15)
    sys.exit(not met)


if __name__ == "__main__":
    main()
