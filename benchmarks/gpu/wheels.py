"""Build the wheels that a machine without a network still needs, for Python 3.12 on x86-64.

Packages published only as source are built here, without compiling anything; of bitsandbytes the libraries for other
devices are left out. No dependency of a listed package is fetched: neither torch nor CUDA may travel.
"""

from __future__ import annotations

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
PYTHON = "3.12"
PLATFORMS = tuple(f"manylinux{n}_x86_64" for n in ("_2_28", "_2_27", "_2_24", "_2_17", "2014", "1"))
FROM_SOURCE = ("deepspeed",)
KEPT_LIBRARIES = ("_cpu.so", "_cuda130.so", "_cuda132.so")  # of bitsandbytes


def wanted(text: str) -> list[str]:
    r"""Return the requirements of a list.

    >>> wanted("# a comment\nhjson==3.1.0\n\ndill==0.4.1\n")
    ['hjson==3.1.0', 'dill==0.4.1']
    """
    lines = (line.split("#")[0].strip() for line in text.splitlines())
    return [line for line in lines if line]


def commands(folder: Path, requirements: list[str], sources: list[str]) -> list[list[str]]:
    """Return pip's commands. A source folder becomes an absolute path: pip takes a bare name for a package's."""
    pip = [sys.executable, "-m", "pip"]
    binary = [line for line in requirements if line.split("==")[0] not in FROM_SOURCE]
    built = [line for line in requirements if line not in binary]
    target = ["--only-binary=:all:", f"--python-version={PYTHON}", "--implementation=cp"]
    target += [f"--platform={platform}" for platform in PLATFORMS]
    download = [*pip, "download", "-q", "--no-deps", *target, "-d", str(folder), *binary]
    build = [*pip, "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(folder)]
    folders = [str(Path(source).resolve()) if Path(source).is_dir() else source for source in sources]
    return [download, *([*build, source] for source in [*built, *folders])]


def slim(wheel: Path) -> None:
    """Remove the libraries for other devices from bitsandbytes' wheel, and from its list of files."""
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


def build(folder: Path, sources: list[str]) -> None:
    """Fetch, build and slim the wheels.

    Args:
        folder: an empty folder for them.
        sources: source folders or addresses of which wheels are made as well.

    Raises:
        subprocess.CalledProcessError: pip failed.
        ValueError: a wheel does not run on the machine, or must not travel.
    """
    for command in commands(folder, wanted(LIST.read_text()), sources):
        subprocess.run(command, check=True, env={**os.environ, "DS_BUILD_OPS": "0"})
    for wheel in folder.glob("bitsandbytes-*.whl"):
        slim(wheel)
    for wheel in folder.glob("*.whl"):
        if not runs_there(wheel.name):
            raise ValueError(f"{wheel.name} does not run on Python {PYTHON} of an x86-64 machine, or must not travel")


def runs_there(name: str) -> bool:
    """Return whether a wheel runs on the machine, by its file name.

    >>> runs_there("hjson-3.1.0-py3-none-any.whl"), runs_there("rpds_py-1-cp311-cp311-manylinux_2_17_x86_64.whl")
    (True, False)
    """
    package, python, _, platform = name.removesuffix(".whl").rsplit("-", 3)
    tag = "cp" + PYTHON.replace(".", "")
    fits = any(one in ("py3", "py312", tag) for one in python.split("."))
    here = any(one == "any" or one in PLATFORMS for one in platform.split("."))
    return fits and here and not package.lower().startswith(("torch-", "triton-", "nvidia"))
