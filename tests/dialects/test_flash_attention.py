"""flash-attention's conventions: errors and corner cases."""

import numpy as np
import pytest

from minimha.dialects.flash_attention import flash_attn_func

Q = np.zeros((1, 2, 1, 1))
V = np.array([2.0, 4.0, 9.0]).reshape(1, 3, 1, 1)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [5, 5]),
        ({"causal": True}, [3, 5]),
        ({"window_size": (0, -1)}, [6.5, 9]),
        ({"window_size": (0, 0), "sink_token_length": 1}, [3, 5.5]),
        ({"key_padding_mask": [[True, True, False]], "causal": True}, [2, 3]),
        ({"query_padding_mask": [[True, False]], "causal": True}, [5, 0]),
        ({"key_leftpad": [1]}, [6.5, 6.5]),
        ({"attention_chunk": 2}, [3, 9]),
    ],
)
def test_equal_scores_average_the_values_that_are_seen(options, expected):
    output, _ = flash_attn_func(Q, V * 0, V, **options)
    np.testing.assert_allclose(output.ravel(), expected, 1e-12)


@pytest.mark.parametrize(
    ("options", "error", "sentence"),
    [
        ({"window_size": 3}, ValueError, "window_size is 3"),
        ({"key_padding_mask": [[1, 1, 0]]}, TypeError, "expected bool, True = keep"),
        ({"key_leftpad": [4]}, ValueError, "key_leftpad is"),
        ({"alibi_slopes": [1.0, 2.0]}, ValueError, "alibi_slopes has shape"),
        ({"attention_chunk": -1}, ValueError, "attention_chunk is -1"),
    ],
)
def test_errors_name_the_argument(options, error, sentence):
    with pytest.raises(error, match=sentence):
        flash_attn_func(Q, V, V, **options)
