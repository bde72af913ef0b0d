"""The lab's models: the same bytes for the same shape, a file that its format's rules hold for, clear complaints."""

import hashlib
import json

import numpy as np
import pytest

from rackbook.engine import lab_model
from rackbook.errors import ParameterError


def tensors(folder, dtype):
    content = (folder / "model.safetensors").read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header.pop("__metadata__")
    ends = [entry["data_offsets"] for entry in header.values()]
    assert [start for start, _ in ends] == [0, *(end for _, end in ends[:-1])], "no gap, no overlap"
    assert 8 + length + ends[-1][1] == len(content)
    return {
        name: np.frombuffer(content, dtype, offset=8 + length)[
            entry["data_offsets"][0] // np.dtype(dtype).itemsize : entry["data_offsets"][1] // np.dtype(dtype).itemsize
        ].reshape(entry["shape"])
        for name, entry in header.items()
    }


def test_weights_have_the_shapes_that_the_configuration_promises(tmp_path):
    folder = lab_model.write(tmp_path, dtype="float32", hidden=192, layers=3, experts=4, top_k=1)
    config = json.loads((folder / "config.json").read_text())
    found = tensors(folder, "<f4")
    heads, kv_heads, head = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    assert (heads, kv_heads, head) == (3, 1, 64)
    assert found["model.layers.2.self_attn.q_proj.weight"].shape == (heads * head, 192)
    assert found["model.layers.2.self_attn.k_proj.weight"].shape == (kv_heads * head, 192)
    assert found["model.layers.0.mlp.gate.weight"].shape == (4, 192)
    assert found["model.layers.0.mlp.experts.3.down_proj.weight"].shape == (192, config["moe_intermediate_size"])
    assert len(found) == 3 + 3 * (9 + 3 * 4)
    assert (
        sum(tensor.size for tensor in found.values())
        == lab_model.Shape(hidden=192, layers=3, experts=4, top_k=1).num_parameters
    )


def test_the_same_shape_gives_the_same_bytes_everywhere(tmp_path):
    """The digest was taken once: a change in numpy's generator or in the order of tensors would show."""
    folder = lab_model.write(tmp_path, layers=1, experts=2, vocabulary=16)
    digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    assert digest[:16] == "b8c92cfd31349a7c"


def test_another_seed_gives_other_weights(tmp_path):
    first = lab_model.write(tmp_path / "a", layers=1, experts=2, seed=1)
    second = lab_model.write(tmp_path / "b", layers=1, experts=2, seed=2)
    assert (first / "config.json").read_bytes() == (second / "config.json").read_bytes()
    assert (first / "model.safetensors").read_bytes() != (second / "model.safetensors").read_bytes()


def test_16_bit_weights_are_the_nearest_to_the_32_bit_ones(tmp_path):
    wide = tensors(lab_model.write(tmp_path / "a", layers=1, experts=2, dtype="float32"), "<f4")
    narrow = tensors(lab_model.write(tmp_path / "b", layers=1, experts=2), "<u2")
    for name, values in wide.items():
        rounded = (narrow[name].astype(np.uint32) << 16).view(np.float32)
        assert np.all(np.abs(rounded - values) <= np.abs(values) * 2.0**-8), name


@pytest.mark.parametrize(
    ("value", "nearest"),
    [(1.0, 0x3F80), (1.0 + 2**-8, 0x3F80), (1.0 + 3 * 2**-8, 0x3F82), (1.0 + 2**-8 + 2**-16, 0x3F81), (-2.5, 0xC020)],
)
def test_ties_between_16_bit_numbers_go_to_the_even_one(value, nearest):
    assert lab_model._bfloat16(np.array([value], dtype=np.float32))[0] == nearest


def test_a_complete_model_is_left_alone_and_another_shape_replaces_it(tmp_path):
    folder = lab_model.write(tmp_path, layers=1, experts=2)
    weights = folder / "model.safetensors"
    stamp = weights.stat().st_mtime_ns
    lab_model.write(tmp_path, layers=1, experts=2)
    assert weights.stat().st_mtime_ns == stamp
    lab_model.write(tmp_path, layers=2, experts=2)
    assert json.loads((folder / "config.json").read_text())["num_hidden_layers"] == 2
    assert weights.stat().st_mtime_ns != stamp


def test_an_interrupted_model_is_written_again(tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    lab_model.write(tmp_path, layers=1, experts=2)
    with monkeypatch.context() as patch:
        patch.setattr(lab_model, "_write_weights", interrupted)
        with pytest.raises(KeyboardInterrupt):
            lab_model.write(tmp_path, layers=2, experts=2)
    lab_model.write(tmp_path, layers=1, experts=2)
    assert json.loads((tmp_path / "config.json").read_text())["num_hidden_layers"] == 1


def test_every_token_is_a_word_of_its_own(tmp_path):
    folder = lab_model.write(tmp_path, layers=1, experts=2, vocabulary=32)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    assert list(vocabulary.values()) == list(range(32))
    assert list(vocabulary)[:5] == ["<unk>", "<bos>", "<eos>", "t3", "t4"]
    assert not [word for word in vocabulary if " " in word]


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ({"hidden": 100}, "hidden: got 100, allowed: a multiple of 64"),
        ({"experts": 4, "top_k": 5}, "top_k: got 5, allowed: at most the 4 experts"),
        ({"layers": 0}, "layers Input should be greater than or equal to 1"),
        ({"dtype": "int3"}, "dtype Input should be 'bfloat16' or 'float32'"),
        ({"hiden": 64}, "unknown field of the lab model's shape: got 'hiden'.* Did you mean 'hidden'"),
    ],
)
def test_shapes_that_cannot_be_served_are_refused(tmp_path, shape, words):
    with pytest.raises(ParameterError, match=words):
        lab_model.write(tmp_path, **shape)
    assert not list(tmp_path.iterdir())


def test_names_tell_shapes_apart():
    names = {lab_model.name(), lab_model.name(seed=1), lab_model.name(**lab_model.COMPUTE_DOMINATED)}
    assert len(names) == 3
    assert lab_model.name(layers=2) == lab_model.name(), "the default spelt out"
