"""The build: the version from git, and folders at the top of the repository; pyproject.toml has the rest.

The folders travel in the wheel, in `dpllm/shipped`. An editable installation leaves them where they are;
`dpllm.config.shipped` finds them in both places. Wheel and source distribution hold the version and the commit of their
checkout in a file (`dpllm.config.versions`); a build without git has that of a source distribution, or an unknown one.
"""

import json
import runpy
import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

ROOT = Path(__file__).resolve().parent
SHIPPED = ("recipes", "accelerate_configs", "launch")
VERSIONS = runpy.run_path(
    str(ROOT / "dpllm" / "config" / "versions.py")
)  # dpllm itself needs what is not installed yet
CODE = VERSIONS["code_version"]()


def write_commit(package: Path) -> None:
    """Write the version and the commit into a copy of the package."""
    (package / VERSIONS["COMMIT_FILE"]).write_text(json.dumps(CODE._asdict()) + "\n", encoding="utf-8")


class BuildWithShippedFolders(build_py):
    """The modules of the package, the shipped folders beside them, and the commit."""

    def run(self) -> None:
        """Copy all, and write the commit."""
        super().run()
        if self.editable_mode:
            return
        for source, target in self._shipped().items():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target)  # with its mode: scripts stay executable
        write_commit(Path(self.build_lib) / "dpllm")

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        """Return all files of the build."""
        commit = Path(self.build_lib) / "dpllm" / VERSIONS["COMMIT_FILE"]
        own = [] if self.editable_mode else [str(target) for target in (*self._shipped().values(), commit)]
        return [*super().get_outputs(include_bytecode), *own]

    def _shipped(self) -> dict[Path, Path]:
        goal = Path(self.build_lib) / "dpllm" / "shipped"
        files = (path for folder in SHIPPED for path in sorted((ROOT / folder).rglob("*")) if path.is_file())
        return {path: goal / path.relative_to(ROOT) for path in files if "__pycache__" not in path.parts}


class SourceWithCommit(sdist):
    """The source distribution, which has no git, with the commit."""

    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        """Copy the files, and write the commit."""
        super().make_release_tree(base_dir, files)
        write_commit(Path(base_dir) / "dpllm")


setup(version=CODE.version, cmdclass={"build_py": BuildWithShippedFolders, "sdist": SourceWithCommit})
