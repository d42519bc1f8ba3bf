"""What the settings of a config.json are called here, and what they mean."""

import pytest

from minimha.layers.rope import RoPE
from minimha.layers.scalings import YaRNScaling
from minimha.models.checkpoints import llama
from minimha.models.checkpoints.settings import Settings

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


@pytest.mark.parametrize(
    ("given", "expected"), [({}, True), ({"truncate": None}, True), ({"truncate": False}, False)]
)
def test_whether_yarn_rounds_its_ends(given, expected):
    rope = Settings({"rope_parameters": YARN | given}).rope(8)
    assert rope.scaling == YaRNScaling(4, 16, truncate=expected)


def test_a_setting_of_yarn_that_is_no_flag_is_refused():
    with pytest.raises(TypeError, match="truncate is 0: expected True or False"):
        Settings({"rope_parameters": YARN | {"truncate": 0}}).rope(8)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"linear_num_key_heads": 5}, "num_value_heads is 32 and its linear_num_key_heads 5: the"),
        ({"layer_types": ["mamba"] * 2}, "expected linear_attention or full_attention for each of"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu': only 'silu' is implemented"),
        ({"linear_conv_kernel_dim": 0}, "linear_conv_kernel_dim is 0: expected"),
    ],
)
def test_a_gated_delta_net_of_another_kind_is_refused(given, sentence):
    config = {
        "model_type": "qwen3_next", "vocab_size": 100, "hidden_size": 64, "num_hidden_layers": 2,
        "intermediate_size": 96, "num_attention_heads": 4, "max_position_embeddings": 64,
    }  # fmt: skip
    assert llama.read_config(Settings(config)).ropes == (None, None)
    with pytest.raises(ValueError, match=sentence):
        llama.read_config(Settings(config | given))


def test_olmo_3_as_it_is_published_scales_the_angles_of_its_global_layers():
    config = llama.read_config(Settings({
        "model_type": "olmo3", "vocab_size": 100, "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 4, "num_attention_heads": 4, "max_position_embeddings": 64,
        "rope_theta": 5e5, "rope_scaling": YARN, "sliding_window": 8,
    }))  # fmt: skip
    assert config.windows == (8, 8, 8, None)
    assert config.ropes[3] == RoPE(16, 5e5, scaling=YaRNScaling(4, 16))
    assert config.ropes[:3] == (RoPE(16, 5e5),) * 3
