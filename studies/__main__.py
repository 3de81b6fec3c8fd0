"""The study: the paper's findings at laptop scale. ``docs/study.md`` tells what was found.

    python -m studies run fashion            # one experiment, or several; resumable: give the same command again
    python -m studies run --all              # hours
    python -m studies run cifar --only ada-auto    # one method again; the others' results stay as they are
    python -m studies small                  # the cells that CI repeats; a few minutes
    python -m studies figures                # the figures and tables of the page, from the committed results

An experiment is a spec in ``studies/specs``, some with more parts: ``NAME.more.toml`` and ``NAME.most.toml`` have more seeds of the methods
which are compared pair by pair, ``NAME.bits.toml`` a control; its raw results go to ``runs/study-NAME`` and a small extract to
``studies/results``. CIFAR-10 and WikiText-2 are looked for in ``$GOSSAMER_DATA``.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

import benchmarks.field  # noqa: F401  (its methods, for specs; in worker processes too)
from gossamer.dbench.runner import bench
from gossamer.dbench.spec import Spec, load
from gossamer.errors import GossamerError
from studies import extract, figures, small

HERE = Path(__file__).parent
SPECS, RESULTS = HERE / "specs", HERE / "results"


def parts(name: str) -> list[Path]:
    """The specs of an experiment."""
    return [SPECS / f"{name}.toml", *sorted(SPECS.glob(f"{name}.*.toml"))]


def selected(spec: Spec, only: str | None) -> Spec | None:
    """The spec with that method alone; None if it does not have it."""
    if only is None:
        return spec
    methods = tuple(method for method in spec.methods if method.name == only)
    return spec.model_copy(update={"methods": methods}) if methods else None


def run(names: list[str], jobs: int | None, only: str | None = None) -> bool:
    for name in names:
        folders = []
        specs = {path.stem: spec for path in parts(name) if (spec := selected(load(str(path)), only)) is not None}
        if not specs:
            raise GossamerError(f"--only {only}: {name} has no such method")
        for stem, spec in specs.items():
            out = re.sub("[^a-z0-9.]+", "-", f"study-{stem}-{only}".lower()) if only else f"study-{stem}"
            outcome = bench(spec, Path("runs") / out, jobs=jobs)
            if not outcome.complete:
                print("Stopped. Give the same command again to go on.", file=sys.stderr)
                return False
            folders.append(outcome.out)
        extract.write(folders, RESULTS / f"{name}.json", keep=only is not None)
        print(f"{name}: {RESULTS / f'{name}.json'}")
    return True


def main() -> None:
    known = sorted(path.stem for path in SPECS.glob("*.toml") if "." not in path.stem)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="what", required=True)
    runs = commands.add_parser("run", help="run experiments")
    runs.add_argument("names", nargs="*", metavar="NAME", help=", ".join(known))
    runs.add_argument("--all", action="store_true")
    runs.add_argument("--only", metavar="METHOD", help="run this method only, and keep the results of the others")
    runs.add_argument("--jobs", type=int, help="runs side by side (default: one per core)")
    commands.add_parser("figures", help="figures and tables from the committed results").add_argument(
        "--out", type=Path, default=HERE.parent / "docs" / "study", help="a folder"
    )
    commands.add_parser("small", help="the small cells that CI repeats")
    args = parser.parse_args()
    if args.what == "small":
        small.write()
        return
    if args.what == "figures":
        for path in figures.write(RESULTS, args.out):
            print(path)
        return
    names = known if args.all else args.names
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        parser.error(f"{', '.join(unknown) or 'no experiment given'}; known are {', '.join(known)}")
    try:
        sys.exit(0 if run(names, args.jobs, args.only) else 130)
    except GossamerError as error:
        sys.exit(f"studies: {error}")


if __name__ == "__main__":
    main()
