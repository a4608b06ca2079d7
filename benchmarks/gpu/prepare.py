"""Build everything that has to travel to the machine with the GPU, and print its size.

    benchmarks/gpu.sh prepare                                  # .whl and .material
    benchmarks/gpu.sh prepare fast-differential-privacy        # and a wheel of a source folder: fastDP, for comparison
    benchmarks/gpu.sh prepare --material folder                # folder with stories15M, e2e/trainset.csv and devset.csv

.whl holds the wheels of wheels.txt, .material the pretrained weights and part of the records. Git ignores both. Each is
built in a temporary folder and then renamed, so that a failed build changes nothing. bitsandbytes is left out if the
sum exceeds the limit.
"""

from __future__ import annotations

import argparse
import csv
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from gpu import wheels

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 60.0  # MiB that travel, tracked files included
RECORDS = 8000  # of the training set: enough for a pass of each measurement
WEIGHTS = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
OPTIONAL = "bitsandbytes-*.whl"


def main(arguments: list[str]) -> int:
    """Build, print the sizes, and return the exit status: 1 if anything is missing or too large."""
    parser = argparse.ArgumentParser(
        prog="benchmarks/gpu.sh prepare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sources", nargs="*", help="source folders of which wheels are built as well")
    parser.add_argument("--material", type=Path, default=ROOT.parent / "shared" / "data", help="default %(default)s")
    parser.add_argument("--into", type=Path, default=ROOT, help="where .whl and .material go")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(dir=options.into, prefix=".prepare-") as scratch:
        folders = {name: Path(scratch) / name for name in (".whl", ".material")}
        try:
            collect_material(options.material, folders[".material"])
            folders[".whl"].mkdir()
            wheels.build(folders[".whl"], options.sources)
        except (OSError, ValueError, subprocess.CalledProcessError) as error:
            print(f"nothing was changed: {error}", file=sys.stderr)
            return 1
        tree = tracked_mib()
        optional = list(folders[".whl"].glob(OPTIONAL))
        if optional and tree + sum(map(mib, folders.values())) > LIMIT:
            print(f"bitsandbytes ({mib(optional[0]):.1f} MiB) is left out: the step with 4 bits will be skipped")
            optional[0].unlink()
        sizes = {"tracked files": tree, **{name: mib(path) for name, path in folders.items()}}
        for name, size in sizes.items():
            print(f"{size:6.1f} MiB  {name}")
        total = sum(sizes.values())
        print(f"{total:6.1f} MiB  of {LIMIT:g}")
        if total > LIMIT:
            print(f"nothing was changed: {total:.1f} MiB are more than the {LIMIT:g} that may travel", file=sys.stderr)
            return 1
        for name, path in folders.items():
            shutil.rmtree(options.into / name, ignore_errors=True)
            path.rename(options.into / name)
    commit = git("describe", "--always", "--dirty", "--abbrev=12", "--exclude=*").strip()
    print("The two visits; next to the tracked files, the first needs .whl and the second .whl and .material:")
    print(f"  DPLLM_COMMIT={commit} benchmarks/gpu.sh first     # {tree + sizes['.whl']:.1f} MiB travel")
    print(f"  DPLLM_COMMIT={commit} benchmarks/gpu.sh second    # {total:.1f} MiB travel")
    return 0


def collect_material(source: Path, target: Path) -> None:
    """Copy the weights, the development set, and records taken evenly from the training set, which is sorted."""
    (target / "stories15M").mkdir(parents=True)
    (target / "e2e").mkdir()
    for name in WEIGHTS:
        shutil.copy(source / "stories15M" / name, target / "stories15M" / name)
    shutil.copy(source / "e2e" / "devset.csv", target / "e2e" / "devset.csv")
    with open(source / "e2e" / "trainset.csv", newline="", encoding="utf-8-sig") as file:
        head, *rows = csv.reader(file)
    count = min(RECORDS, len(rows))
    with open(target / "e2e" / "trainset.csv", "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([head, *(rows[n * len(rows) // count] for n in range(count))])


def mib(path: Path) -> float:
    """Return the size of a file, or of all files in a folder."""
    files = [path] if path.is_file() else [one for one in path.rglob("*") if one.is_file()]
    return sum(one.stat().st_size for one in files) / 2**20


def tracked_mib() -> float:
    """Return the size of the files that git tracks or does not ignore."""
    names = git("ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")
    return sum(mib(ROOT / name) for name in names if name and (ROOT / name).is_file())


def git(*arguments: str) -> str:
    """Return the output of a command of git in this repository."""
    return subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True).stdout
