"""tensor_file.py against the safetensors library, both ways, and what it says of files that are none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from megatron_patch.integration.checkpoint import tensor_file

DTYPES = [torch.int8, torch.uint8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64]  # fmt: skip  # noqa: E501
SHAPES = st.lists(st.integers(0, 5), max_size=3)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype
        and one[name].shape == other[name].shape
        and torch.equal(one[name].reshape(-1).view(torch.uint8), other[name].reshape(-1).view(torch.uint8))
        for name in one
    )


@given(st.dictionaries(st.text(max_size=8), st.tuples(st.sampled_from(DTYPES), SHAPES), max_size=5))
def test_the_library_reads_what_was_written_and_the_other_way_round(tmp_path_factory, kinds):
    kinds.pop("__metadata__", None)
    generator = torch.Generator().manual_seed(len(kinds))
    tensors = {
        name: (1000 * torch.randn(shape, generator=generator)).to(dtype)
        for name, (dtype, shape) in kinds.items()
    }
    path = tmp_path_factory.mktemp("files") / "file"
    with path.open("wb") as file:
        tensor_file.write(file, tensors)
    assert same(load_file(path), tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    read = tensor_file.TensorFile(path)
    assert same({name: read.read(name) for name in read.names()}, tensors)


def written(path: Path, header: object, data: bytes = bytes(16)) -> Path:
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [4], "data_offsets": [4, 20]},  # behind the end
        {"dtype": "F32", "shape": [3], "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": [-2, -2], "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": [2.0, 2], "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [4], "data_offsets": [16, 0]},
        {"dtype": "F32", "shape": [4], "data_offsets": [0, 8, 16]},
        {"dtype": "X", "shape": [4], "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": [4]},
        [],
    ],
)
def test_a_header_that_is_wrong_is_refused(tmp_path: Path, entry: object) -> None:
    with pytest.raises(ValueError, match="wrong about 'a'"):
        tensor_file.TensorFile(written(tmp_path / "file", {"a": entry}))


def test_what_is_no_such_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for content in (b"", b"\x01", bytes([255] * 8), (9).to_bytes(8, "little") + b"{}", bytes(8) + b"{}"):
        path.write_bytes(content)
        with pytest.raises(ValueError):
            tensor_file.TensorFile(path)
    with pytest.raises(ValueError, match="no mapping"):
        tensor_file.TensorFile(written(path, [1]))
