"""What the settings of a config.json are called here, and what they mean."""

import pytest

from minimha.layers.scalings import YaRNScaling
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
