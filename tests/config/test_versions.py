"""The version of dpllm is that of its commit, wherever it runs."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.version import Version

import dpllm
from dpllm.config.versions import COMMIT_FILE, code_version, has_format, other_format, version_of

NAMES = ("__init__.py", "config/__init__.py", "config/versions.py", "mechanism/limits.py")
UNKNOWN = ("0.2.dev0+unknown", None, False)


def git(folder, *words):
    own = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main"]
    return subprocess.run(["git", *who, *words], cwd=folder, env=own, check=True, capture_output=True, text=True).stdout


def commit(folder):
    git(folder, "add", "-A")
    git(folder, "commit", "-m", "a change")
    return git(folder, "rev-parse", "HEAD").strip()


@pytest.fixture
def checkout(tmp_path):
    """A repository of one commit with a copy of the package's modules that know the version."""
    folder = tmp_path / "checkout"
    for name in NAMES:
        (folder / "dpllm" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(Path(dpllm.__file__).parent / name, folder / "dpllm" / name)
    (folder / "dpllm" / "config" / "__init__.py").write_text("")
    (folder / "pyproject.toml").write_text('[project]\nname = "dpllm"\n')
    (folder / ".gitignore").write_text("__pycache__/\nignored.py\n")
    git(folder, "init")
    commit(folder)
    return folder


def found(folder, **environment):
    """Return the version that a new process of the copy states."""
    code = "import json, dpllm; from dpllm.config.versions import code_version as code; "
    code += "print(json.dumps([dpllm.__version__, *code()]))"
    own = {**os.environ, "PYTHONPATH": str(folder), **environment}
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, env=own, check=True, capture_output=True, text=True)
    stated, *rest = json.loads(done.stdout)
    assert stated == rest[0] == str(Version(stated))
    return tuple(rest)


def test_two_commits_have_two_versions_and_a_changed_tree_has_a_third(checkout):
    """The full commit is known too; a file that is no part of the package changes nothing."""
    first = git(checkout, "rev-parse", "HEAD").strip()
    assert found(checkout) == (f"0.2.dev1+g{first[:9]}", first, False)
    (checkout / "dpllm" / "mechanism" / "limits.py").write_text("changed = 1\n")
    assert found(checkout) == (f"0.2.dev1+g{first[:9]}.dirty", first, True)
    second = commit(checkout)
    assert found(checkout) == (f"0.2.dev2+g{second[:9]}", second, False)
    for name in ("notes.txt", "dpllm/notes.txt", "dpllm/ignored.py"):
        (checkout / name).write_text("x")
    assert found(checkout) == (f"0.2.dev2+g{second[:9]}", second, False)
    (checkout / "dpllm" / "config" / "untracked.py").write_text("")
    assert found(checkout) == (f"0.2.dev2+g{second[:9]}.dirty", second, True)
    (checkout / "dpllm" / "config" / "untracked.py").unlink()
    assert Version(found(checkout)[0]) > Version(f"0.2.dev1+g{first[:9]}")


def test_the_commit_of_a_tag_is_that_release_unless_it_is_changed(checkout):
    """An index takes no version that names a commit; other tags name no release."""
    first = git(checkout, "rev-parse", "HEAD").strip()
    git(checkout, "tag", "tried")
    assert found(checkout) == (f"0.2.dev1+g{first[:9]}", first, False)
    git(checkout, "tag", "v0.2rc1")
    assert found(checkout) == ("0.2rc1", first, False)
    (checkout / "dpllm" / "mechanism" / "limits.py").write_text("changed = 1\n")
    assert found(checkout) == (f"0.2.dev1+g{first[:9]}.dirty", first, True)
    second = commit(checkout)
    assert found(checkout) == (f"0.2.dev2+g{second[:9]}", second, False)


def test_a_shallow_clone_has_its_commit(checkout, tmp_path):
    """The number of commits is unknown."""
    (checkout / "notes.txt").write_text("x")
    last = commit(checkout)
    git(tmp_path, "clone", "--depth", "1", f"file://{checkout}", "shallow")
    assert found(tmp_path / "shallow") == (f"0.2.dev0+g{last[:9]}", last, False)


def test_the_commit_of_another_project_is_not_taken(checkout, tmp_path):
    """Where dpllm lies deeper in it, where its git does not track dpllm, and beside another pyproject.toml."""
    shutil.copytree(checkout / "dpllm", tmp_path / "other" / "vendor" / "dpllm")
    git(tmp_path / "other", "init")
    commit(tmp_path / "other")
    assert found(tmp_path / "other" / "vendor") == UNKNOWN
    shutil.copytree(checkout / "dpllm", tmp_path / "third" / "dpllm")
    (tmp_path / "third" / ".gitignore").write_text("dpllm/\n")
    git(tmp_path / "third", "init")
    commit(tmp_path / "third")
    assert found(tmp_path / "third") == UNKNOWN
    for project in ('[project]\nname = "other"\n', "[tool]\n"):
        (checkout / "pyproject.toml").write_text(project)
        assert found(checkout) == UNKNOWN


def test_without_git_or_in_a_checkout_that_git_does_not_read_the_version_is_unknown(checkout, tmp_path):
    """No crash: a report says that its commit is unknown."""
    (tmp_path / "bin").mkdir()
    assert found(checkout, PATH=str(tmp_path / "bin")) == UNKNOWN
    refusing = tmp_path / "bin" / "git"
    refusing.write_text("#!/bin/sh\necho 'fatal: detected dubious ownership in repository' >&2\nexit 128\n")
    refusing.chmod(0o755)
    assert found(checkout, PATH=str(tmp_path / "bin")) == UNKNOWN
    shutil.rmtree(checkout / ".git")
    assert found(checkout) == UNKNOWN


def test_an_installed_package_has_the_commit_from_which_it_was_built(tmp_path):
    """It lies in a file of the package; one that is damaged is as good as none."""
    (tmp_path / COMMIT_FILE).write_text('{"version": "0.2.dev5+gabc", "commit": "abc", "changed": false}')
    assert version_of(tmp_path) == ("0.2.dev5+gabc", "abc", False)
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / COMMIT_FILE).write_text('{"version": 5')
    assert version_of(tmp_path / "damaged") == UNKNOWN


def test_git_is_not_asked_at_import():
    """`import dpllm` takes milliseconds; the version is read when somebody asks for it."""
    code = "import sys, dpllm; assert 'subprocess' not in sys.modules"
    own = {**os.environ, "PYTHONPATH": str(Path(dpllm.__file__).parents[1])}
    subprocess.run([sys.executable, "-S", "-c", code], env=own, check=True)


def test_the_running_version_is_valid_and_read_once():
    """By PEP 440."""
    assert str(Version(dpllm.__version__)) == dpllm.__version__ == code_version().version
    assert code_version() is code_version()


@pytest.mark.parametrize("value", [2, 0, "1", True, None, [1]])
def test_a_file_of_another_format_names_what_reads_it(value):
    """One line: what, where, and the version that wrote it."""
    words = other_format("plan", value, 1, "0.2 of commit abc")
    assert re.fullmatch(r"is a plan of format .*reads format 1: use dpllm 0\.2 of commit abc", words)
    assert has_format(1, 1) and not has_format(value, 1)
