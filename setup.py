"""The build: folders at the top of the repository travel in the wheel, in `dpllm/shipped`; pyproject.toml has the rest.

An editable installation leaves them where they are; `dpllm.config.shipped` finds them in both places.
"""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
SHIPPED = ("recipes", "accelerate_configs", "launch")


class BuildWithShippedFolders(build_py):
    """The modules of the package, and the shipped folders beside them."""

    def run(self) -> None:
        """Copy both."""
        super().run()
        if self.editable_mode:
            return
        for source, target in self._shipped().items():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target)  # with its mode: scripts stay executable

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        """Return all files of the build."""
        own = [] if self.editable_mode else [str(target) for target in self._shipped().values()]
        return [*super().get_outputs(include_bytecode), *own]

    def _shipped(self) -> dict[Path, Path]:
        goal = Path(self.build_lib) / "dpllm" / "shipped"
        files = (path for folder in SHIPPED for path in sorted((ROOT / folder).rglob("*")) if path.is_file())
        return {path: goal / path.relative_to(ROOT) for path in files if "__pycache__" not in path.parts}


setup(cmdclass={"build_py": BuildWithShippedFolders})
