"""Render the labs to notebooks: `python labs/render.py [--execute] [--out FOLDER] [LAB ...]`.

The percent-format Python files are the source; notebooks are build products, never edited and
never committed. `--execute` runs every cell and stores the output.
"""

import argparse
import shutil
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
HELPERS = ("lab_tools.py", "rounding.py", "tiles.py")
CELL_TIMEOUT_S = 120


def find_labs(names: list[str]) -> list[Path]:
    """The labs whose file names start with one of `names` ("02"), or all of them."""
    labs = sorted(HERE.glob("[0-9][0-9]_*.py"))
    chosen = [lab for lab in labs if not names or lab.name.startswith(tuple(names))]
    if not chosen:
        raise SystemExit(
            f"No lab starts with {' or '.join(names)}; there are {', '.join(x.name for x in labs)}."
        )
    return chosen


def render(lab: Path, folder: Path, execute: bool) -> Path:
    """Write one notebook and return its path."""
    import jupytext
    import nbformat

    notebook = jupytext.read(lab)
    notebook.metadata["kernelspec"] = {
        "name": "python3",
        "display_name": "Python 3",
        "language": "python",
    }
    # Jupytext draws random ids; fixed ones make the same lab render to the same bytes.
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number}"
    if execute:
        # Imported for its error message before any cell runs: the kernel itself is a subprocess.
        import ipykernel  # noqa: F401
        from nbclient import NotebookClient

        NotebookClient(
            notebook,
            timeout=CELL_TIMEOUT_S,
            kernel_name="python3",
            resources={"metadata": {"path": str(folder)}},
        ).execute()
    target = folder / f"{lab.stem}.ipynb"
    nbformat.write(notebook, target)
    return target


def main() -> None:
    parser = argparse.ArgumentParser(description="Render the labs to notebooks.")
    parser.add_argument("labs", nargs="*", metavar="LAB", help="start of a file name, e.g. 02")
    parser.add_argument("--execute", action="store_true", help="run the cells, store the output")
    parser.add_argument("--out", type=Path, default=HERE.parent / "build" / "labs")
    args = parser.parse_args()

    labs = find_labs(args.labs)
    args.out.mkdir(parents=True, exist_ok=True)
    # The notebooks import these from the folder they are in.
    for helper in HELPERS:
        shutil.copy(HERE / helper, args.out)
    try:
        for lab in labs:
            print(render(lab, args.out, args.execute))
    except ModuleNotFoundError as error:
        sys.exit(
            f"Rendering the labs needs {error.name}, which is not installed: run "
            "`pip install jupytext nbformat nbclient ipykernel`."
        )


if __name__ == "__main__":
    main()
