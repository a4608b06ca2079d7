"""The hash of the files of starting weights: each byte counts, and only files that hold weights."""

import pytest

from dpllm.models.start_weights import start_files


@pytest.fixture
def folder(tmp_path):
    for name in ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "pytorch_model.bin"):
        (tmp_path / name).write_bytes(name.encode() * 10)
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def test_every_byte_of_every_file_of_weights_counts(folder):
    """And their names, but nothing else in the folder, nor its own name."""
    first = start_files(str(folder))
    assert first.startswith("2 files, 640 bytes, SHA-256 ")
    (folder / "config.json").write_text("{ }")
    (folder / "pytorch_model.bin").write_bytes(b"not loaded beside safetensors")
    assert start_files(str(folder)) == first
    shard = folder / "model-00002-of-00002.safetensors"
    own = shard.read_bytes()
    for other in (own[:-1] + b"x", own + b"x", own[1:]):
        shard.write_bytes(other)
        assert start_files(str(folder)) != first
    shard.write_bytes(own)
    assert start_files(str(folder.rename(folder.parent / "elsewhere"))) == first


def test_other_kinds_of_files_and_none(folder):
    """Weights of torch where there are no safetensors; a model that is not here has no hash."""
    for shard in folder.glob("*.safetensors"):
        shard.unlink()
    assert start_files(str(folder)).startswith("1 file, 170 bytes, ")
    (folder / "pytorch_model.bin").unlink()
    assert start_files(str(folder)) is None
    assert start_files("nobody/has-this-model") is None and start_files("./gone/a/b") is None
