"""Find the files of a local path: which of them are read for a split, and why the others are not.

Splits are recognised by the names that `datasets` recognises (train, validation, dev, test, ...) in the names of files
and folders.
"""

from __future__ import annotations

import glob
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from datasets.data_files import NON_WORDS_CHARS, SPLIT_KEYWORDS

from dpllm.config import ConfigError
from dpllm.data.readers import ENDINGS, READERS, kind_of, why_unreadable

_SKIPPED = re.compile(r"\.|~\$|__MACOSX$|__pycache__$")  # copies by notebooks, editors and archives
_COMPANION = re.compile(
    r"(readme|licen[cs]e|copying|notice|citation|changelog|manifest|authors)\b.*|.*\.(md5|sha1|sha256|sha512|asc|sig)|"
    r"(md5|sha\d+)sums?(\.txt)?|checksums?\.\w+|dataset_infos?\.json|dataset_dict\.json|_success|thumbs\.db|desktop\.ini",
    re.IGNORECASE,
)
_SHARD = re.compile(r"(\w+(?:\.\w+)*)-\d{5}-of-\d{5}\b")
_KEYWORDS = {word: str(split) for split, words in SPLIT_KEYWORDS.items() for word in words}
_BETWEEN = re.compile(rf"[{re.escape(NON_WORDS_CHARS.replace('0-9', ''))}0-9]+")
_TRAIN = "train"
_MOST_NAMED, _SHOWN = 8, 3  # files, of those that are not read: in a list, and in an error


@dataclass(frozen=True)
class LocalFiles:
    """The files of a local path.

    Attributes:
        path: as in the recipe.
        files: those that can be read, sorted.
        splits: split -> its files; empty: the path has no splits, and all files are one.
        left_out: file -> why it is not read.
    """

    path: str
    files: list[Path]
    splits: dict[str, list[Path]] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    def of(self, names: Sequence[str]) -> dict[str, list[Path]]:
        """Return the files of some splits; where the path has none, all files are the first one.

        Raises:
            ConfigError: the path has splits, and none of that name. The message lists them.
        """
        if not self.splits:
            return {names[0]: self.files}
        for name in names:
            if name not in self.splits:
                held = ", ".join(f"{split} ({len(files)} files)" for split, files in self.splits.items())
                raise ConfigError(
                    f"{self.path}: no split '{name}'. Its files and folders name the splits {held}: set data.split, or "
                    "give one file"
                )
        return {name: self.splits[name] for name in names}

    def canonical(self, split: str) -> str:
        """Return the name of a split of these files: ``dev`` is ``validation`` unless a split has that name."""
        return split if split in self.splits else _KEYWORDS.get(split, split)

    def remarks(self, used: Sequence[str]) -> list[str]:
        """Return one sentence for each file that is not read, at most a few, and one for the splits."""
        found = [f"not read: {name}: {reason}" for name, reason in self.left_out.items()]
        if len(found) > _MOST_NAMED:
            found[_MOST_NAMED - 1 :] = [f"not read: {len(found) - _MOST_NAMED + 1} more files"]
        others = [split for split in self.splits if split not in used]
        if others:
            found.append(
                f"{self.path} has several splits: {' and '.join(used)} is read, {' and '.join(others)} is not "
                "(data.split decides)"
            )
        return found


def find_files(path: str) -> LocalFiles | None:
    """Return the files of a local path; None when the path is a Hub name.

    Raises:
        ConfigError: nothing is there, or nothing that can be read; the message has the reasons.
    """
    try:
        return _found(path, Path(path).expanduser())
    except OSError as error:
        raise ConfigError(f"{path}: it cannot be opened: {error.strerror or error}") from error


def _found(path: str, place: Path) -> LocalFiles | None:
    if place.is_dir():
        return _of_folder(path, place)
    if place.is_file():
        reason = why_unreadable(place)
        if reason is not None:
            raise ConfigError(f"{path}: cannot be read: {reason}. Known endings: {ENDINGS}")
        return LocalFiles(path, [place])
    if place.is_symlink():
        raise ConfigError(f"{path}: it is a link to {os.readlink(place)}, which does not exist. Restore that file")
    if place.exists():
        raise ConfigError(f"{path}: it is neither a file nor a folder")
    if glob.has_magic(path):
        matches = [Path(file) for file in sorted(glob.glob(str(place), recursive=True)) if not os.path.isdir(file)]
        if not matches:
            raise ConfigError(f"{path}: no file matches this pattern (seen from {os.getcwd()})")
        return _sorted_out(path, Path(os.path.commonpath([file.parent for file in matches])), matches, by_pattern=True)
    if kind_of(place) or place.suffix.lower() in (".zip", ".gz", ".xls") or path.startswith((".", "/", "~")):
        raise ConfigError(f"{path}: no such file or folder (seen from {os.getcwd()})")
    return None


def local_files(path: str, split: str = _TRAIN) -> list[str]:
    """Return the files of a local path that are read for a split; none when the path is a Hub name.

    Raises:
        ConfigError: as `find_files`, or there is no such split.
    """
    found = find_files(path)
    if found is None:
        return []
    names = split_names(split, found)
    return [str(file) for files in found.of(names).values() for file in files]


def split_names(split: str, found: LocalFiles) -> list[str]:
    """Return the splits that an instruction such as ``train[:10%]+dev`` names, in order."""
    parts = [re.split(r"[\[(]", part)[0].strip() for part in split.split("+")]
    return list(dict.fromkeys(found.canonical(name) for name in parts)) or [_TRAIN]


def _of_folder(path: str, folder: Path) -> LocalFiles:
    """Return the files of a folder, or of one that `datasets` wrote by save_to_disk."""
    saved = _listed(folder / "dataset_dict.json", "splits")
    if saved is not None:
        splits = {name: _saved_files(folder / name) for name in saved}
        return LocalFiles(path, [file for files in splits.values() for file in files], splits)
    if _is_saved(folder):
        return LocalFiles(path, _saved_files(folder))
    files: list[Path] = []
    seen = {folder.resolve()}

    def not_listed(error: OSError) -> None:
        raise ConfigError(f"{error.filename}: the folder cannot be listed: {error.strerror}") from error

    for place, folders, names in os.walk(folder, onerror=not_listed, followlinks=True):
        here = Path(place)
        # A link to a folder above would be followed for ever.
        folders[:] = sorted(
            name for name in folders if not _SKIPPED.match(name) and (here / name).resolve() not in seen
        )
        seen.update((here / name).resolve() for name in folders)
        files += _saved_files(here) if _is_saved(here) else [here / name for name in names]
    return _sorted_out(path, folder, sorted(files))


def _sorted_out(path: str, folder: Path, files: Sequence[Path], by_pattern: bool = False) -> LocalFiles:
    """Return the files that can be read, by split, and the reasons against the others.

    Args:
        path: as in the recipe.
        folder: that holds all files; only names below it count.
        files: all of them.
        by_pattern: whether a pattern names them: files of a single split are then asked for.

    Raises:
        ConfigError: none can be read.
    """
    readable: list[Path] = []
    left_out: dict[str, str] = {}
    for file in files:
        if _SKIPPED.match(file.name) or _COMPANION.fullmatch(file.name):
            continue
        reason = why_unreadable(file)
        if not file.is_file():
            reason = f"a link to {os.readlink(file)}, which does not exist" if file.is_symlink() else "no ordinary file"
        if reason is None:
            readable.append(file)
        else:
            left_out[str(file.relative_to(folder))] = reason
    if not readable:
        reasons = "".join(f"; {name}: {reason}" for name, reason in list(left_out.items())[:_SHOWN])
        raise ConfigError(f"{path}: the folder has no file that ends in {ENDINGS}{reasons}")
    names = [_split_in(file.relative_to(folder)) for file in readable]
    found = set(names) - {None}
    if not found or (len(set(names)) == 1 and by_pattern):
        return LocalFiles(path, readable, {}, left_out)
    splits: dict[str, list[Path]] = {}
    for file, name in zip(readable, names, strict=True):
        if name is not None or _TRAIN not in found:
            splits.setdefault(name or _TRAIN, []).append(file)
        else:
            left_out[str(file.relative_to(folder))] = "its name has no split, as the names of other files have"
    return LocalFiles(path, readable, splits, left_out)


def _split_in(file: Path) -> str | None:
    """Return the split that a relative path names, as `datasets` does: in its folders first, then in its own name."""
    shard = _SHARD.match(file.name)
    if shard and shard[1] != "data":
        return _KEYWORDS.get(shard[1], shard[1]) if file.parts[0] == "data" else _keyword(shard[1])
    return next((split for part in file.parts if (split := _keyword(part))), None)


def _keyword(name: str) -> str | None:
    return next((_KEYWORDS[word] for word in _BETWEEN.split(name.lower()) if word in _KEYWORDS), None)


def _is_saved(folder: Path) -> bool:
    return (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file()


def _saved_files(folder: Path) -> list[Path]:
    """Return the Arrow files of a folder written by save_to_disk, without the copies that `map` may leave there."""
    listed = _listed(folder / "state.json", "_data_files")
    if listed is None:
        raise ConfigError(
            f"{folder}: the folder has no state.json, which save_to_disk writes: write the data set again"
        )
    files = [folder / str(one["filename"]) for one in listed]
    lost = next((file for file in files if not file.is_file()), None)
    if lost is not None:
        raise ConfigError(f"{lost}: state.json lists this file, but it is missing. Copy the whole folder again")
    return files


def _listed(file: Path, key: str) -> list | None:
    """Return a list in a JSON file of `datasets`; None: there is no such file or key."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    value = found.get(key) if isinstance(found, dict) else None
    return value if isinstance(value, list) else None


def refuse_several_kinds(path: str, files: Sequence[Path]) -> None:
    """Raise when files of different kinds would be one data set.

    Raises:
        ConfigError: names the kinds, and a pattern for one of them.
    """
    kinds = sorted({str(kind_of(file)) for file in files} & set(READERS))
    if len(kinds) > 1:
        raise ConfigError(
            f"{path}: the folder has files in different formats ({', '.join(kinds)}). Choose one, such as "
            f"{path}/*{kinds[0]}"
        )
