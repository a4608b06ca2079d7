"""Make the folder of wheels that a machine without a network still needs.

    benchmarks/gpu.sh wheels .whl                              # wheels.txt, for Python 3.12 on x86-64
    benchmarks/gpu.sh wheels .whl fast-differential-privacy    # and a wheel of a source folder, for stage 2

Packages published only as source are built here, without compiling anything; of bitsandbytes the libraries for other
devices are left out. Nothing that is needed in turn is fetched: neither torch nor CUDA can come along.
"""

from __future__ import annotations

import argparse
import base64
import csv
import hashlib
import io
import os
import subprocess
import sys
import zipfile
from pathlib import Path

LIST = Path(__file__).with_name("wheels.txt")
LIMIT = 64 << 20  # bytes that may travel in all
PYTHON = "3.12"
PLATFORMS = tuple(f"manylinux{n}_x86_64" for n in ("_2_28", "_2_27", "_2_24", "_2_17", "2014", "1"))
FROM_SOURCE = ("deepspeed",)
KEPT_LIBRARIES = ("_cpu.so", "_cuda130.so", "_cuda132.so")  # of bitsandbytes


def wanted(text: str) -> list[str]:
    r"""The requirements of a list.

    >>> wanted("# a comment\nhjson==3.1.0\n\ndill==0.4.1\n")
    ['hjson==3.1.0', 'dill==0.4.1']
    """
    lines = (line.split("#")[0].strip() for line in text.splitlines())
    return [line for line in lines if line]


def commands(folder: Path, requirements: list[str], sources: list[str]) -> list[list[str]]:
    """The requirements for pip."""
    pip = [sys.executable, "-m", "pip"]
    binary = [line for line in requirements if line.split("==")[0] not in FROM_SOURCE]
    built = [line for line in requirements if line not in binary]
    target = ["--only-binary=:all:", f"--python-version={PYTHON}", "--implementation=cp"]
    target += [f"--platform={platform}" for platform in PLATFORMS]
    download = [*pip, "download", "-q", "--no-deps", *target, "-d", str(folder), *binary]
    build = [*pip, "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(folder)]
    return [download, *([*build, source] for source in [*built, *sources])]


def slim(wheel: Path) -> None:
    """Leave libraries for other devices out of bitsandbytes' wheel, and out of its list of files."""
    scratch = wheel.with_suffix(".part")
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(scratch, "w", zipfile.ZIP_DEFLATED) as new:
        record = next(name for name in old.namelist() if name.endswith(".dist-info/RECORD"))
        rows = []
        for item in old.infolist():
            name = item.filename
            library = "/libbitsandbytes_" in name and name.endswith(".so")
            if name == record or item.is_dir() or (library and not name.endswith(KEPT_LIBRARIES)):
                continue
            content = old.read(item)
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            rows.append((name, f"sha256={digest}", len(content)))
            new.writestr(item, content, zipfile.ZIP_DEFLATED)
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([*rows, (record, "", "")])
        new.writestr(record, text.getvalue())
    os.replace(scratch, wheel)


def main(arguments: list[str]) -> int:
    """Fetch, build, slim, and say how large it is."""
    parser = argparse.ArgumentParser(
        prog="benchmarks/gpu.sh wheels", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="where the wheels go; it must be empty, or not exist")
    parser.add_argument("sources", nargs="*", help="source folders or addresses of which wheels are made as well")
    options = parser.parse_args(arguments)
    if options.folder.exists() and any(options.folder.iterdir()):
        parser.error(f"{options.folder} is not empty; two versions of one package stop an installation")
    options.folder.mkdir(parents=True, exist_ok=True)
    for command in commands(options.folder, wanted(LIST.read_text()), options.sources):
        subprocess.run(command, check=True, env={**os.environ, "DS_BUILD_OPS": "0"})
    for wheel in options.folder.glob("bitsandbytes-*.whl"):
        slim(wheel)
    return check(options.folder)


def check(folder: Path) -> int:
    """Check that the folder is small enough and runs there: no torch, no wheel of another Python or machine."""
    wheels = sorted(folder.glob("*.whl"))
    total = sum(wheel.stat().st_size for wheel in wheels)
    wrong = [wheel.name for wheel in wheels if not runs_there(wheel.name)]
    print(f"{len(wheels)} wheels, {total / 2**20:.1f} MiB in {folder}")
    if total > LIMIT:
        print(f"more than the {LIMIT >> 20} MiB that may travel", file=sys.stderr)
    for name in wrong:
        print(f"{name} does not run on Python {PYTHON} of an x86-64 machine, or must not come along", file=sys.stderr)
    return 1 if wrong or total > LIMIT else 0


def runs_there(name: str) -> bool:
    """By the file's name.

    >>> runs_there("hjson-3.1.0-py3-none-any.whl"), runs_there("rpds_py-1-cp311-cp311-manylinux_2_17_x86_64.whl")
    (True, False)
    """
    package, python, _, platform = name.removesuffix(".whl").rsplit("-", 3)
    tag = "cp" + PYTHON.replace(".", "")
    fits = any(one in ("py3", "py312", tag) for one in python.split("."))
    here = any(one == "any" or one in PLATFORMS for one in platform.split("."))
    return fits and here and not package.lower().startswith(("torch-", "triton-", "nvidia"))
