"""torch's conventions: errors and corner cases."""

import numpy as np
import pytest

from minimha.dialects.torch import (
    flex_attention,
    multihead_attention,
    scaled_dot_product_attention,
)

X = np.arange(24.0).reshape(1, 2, 3, 4)
I = np.eye(2)
PARAMS = {"in_proj_weight": np.concatenate([I, I, I]), "out_proj.weight": I}


def test_a_query_that_sees_nothing_gets_zero():
    assert not scaled_dot_product_attention(X, X, X, np.zeros((3, 3), bool)).any()


def test_mask_mod_shows_and_score_mod_replaces_the_scores():
    output, lse = flex_attention(
        X, X, X, lambda s, b, h, i, j: s * 0, lambda b, h, i, j: i == j, return_lse=True
    )
    np.testing.assert_array_equal(output, X)
    np.testing.assert_array_equal(lse, 0)


def test_true_means_ignore_in_multihead_attention():
    x = np.array([[1.0, 2.0], [3.0, 4.0]])
    output, weights = multihead_attention(
        PARAMS, x, x, x, num_heads=2, key_padding_mask=[True, False]
    )
    np.testing.assert_array_equal(output, [[3.0, 4.0], [3.0, 4.0]])
    np.testing.assert_array_equal(weights, [[0.0, 1.0], [0.0, 1.0]])


@pytest.mark.parametrize(
    ("options", "error", "sentence"),
    [
        ({"dropout_p": 0.1}, ValueError, "dropout_p is 0.1"),
        ({"attn_mask": np.ones((3, 3), int)}, TypeError, "attn_mask has dtype int64"),
        ({"attn_mask": np.ones((2, 2), bool)}, ValueError, "attn_mask has shape"),
        ({"query": np.zeros((1, 4, 3, 4))}, ValueError, "without enable_gqa"),
    ],
)
def test_errors_name_the_argument(options, error, sentence):
    with pytest.raises(error, match=sentence):
        scaled_dot_product_attention(**{"query": X, "key": X, "value": X, **options})
