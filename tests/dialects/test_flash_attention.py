"""flash-attention's conventions: errors and corner cases."""

import math

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
        ({"q": Q[0]}, ValueError, "q has shape (2, 1, 1): expected 4 axes (B, L, H, D)"),
        ({"k": V > 0}, TypeError, "k has dtype bool: expected integers, float16"),
        ({"k": V[:, :2]}, ValueError, "v has Lk=3 but k has Lk=2: every key needs one value"),
        ({"v": np.ones((1, 3, 2, 1))}, ValueError, "v has 2 heads but k has 1"),
        ({"softmax_scale": "big"}, TypeError, "softmax_scale is 'big': expected a number"),
        ({"softmax_scale": math.inf}, ValueError, "softmax_scale is inf: expected a finite number"),
        ({"causal": 1}, TypeError, "causal is 1: expected True or False"),
        ({"window_size": 3}, ValueError, "window_size is 3: expected a pair (left, right)"),
        ({"window_size": (-2, 0)}, ValueError, "a side of window_size is -2: expected an integer"),
        ({"window_size": (1.5, 0), "sink_token_length": 1}, TypeError,
         "a side of window_size is 1.5: expected an integer"),
        ({"softcap": -1.0}, ValueError, "softcap is -1.0: expected a positive number"),
        ({"learnable_sink": [1.0, 2.0]}, ValueError, "learnable_sink has shape (2,): expected"),
        ({"learnable_sink": [math.nan]}, ValueError, "learnable_sink is [nan]: expected finite"),
        ({"query_padding_mask": [[True]]}, ValueError,
         "query_padding_mask has shape (1, 1): expected (B, L) = (1, 2)"),
        ({"key_padding_mask": [[1, 1, 0]]}, TypeError,
         "key_padding_mask has dtype int64: expected bool, True = keep; it looks like Hugging "
         "Face's attention_mask, where 1 = may attend"),
        ({"key_padding_mask": [[0, 0, -math.inf]]}, TypeError,
         "; it looks like the float masks of torch and ONNX, which are added: 0 = may attend"),
        ({"key_padding_mask": np.ones((1, 1, 2, 3), bool)}, ValueError,
         "; it looks like scaled_dot_product_attention's attn_mask, where True = may attend"),
        ({"key_padding_mask": np.ma.ones((1, 3), bool)}, TypeError,
         "key_padding_mask is a masked array, whose mask would be lost"),
        ({"key_padding_mask": [[True], [True, False]]}, ValueError,
         "key_padding_mask is not a rectangular array"),
        ({"key_leftpad": [4]}, ValueError, "key_leftpad is [4]: expected integers from 0 to Lk=3"),
        ({"key_leftpad": 1}, ValueError, "key_leftpad has shape (): expected (B,) = (1,)"),
        ({"key_leftpad": [1.0]}, TypeError, "key_leftpad has dtype float64: expected integers"),
        ({"key_leftpad": [[1], [1, 2]]}, ValueError, "key_leftpad is not a rectangular array"),
        ({"alibi_slopes": [1.0, 2.0]}, ValueError, "alibi_slopes has shape (2,): expected (H,) = "),
        ({"alibi_slopes": [math.inf]}, ValueError, "alibi_slopes is [inf]: expected finite"),
        ({"attention_chunk": -1}, ValueError, "attention_chunk is -1: expected an integer of"),
        ({"sink_token_length": 0.5}, TypeError, "sink_token_length is 0.5: expected an integer"),
        ({"backend": "gpu"}, ValueError, "backend is 'gpu'"),
    ],
)  # fmt: skip
def test_errors_name_the_argument(options, error, sentence):
    with pytest.raises(error) as caught:
        flash_attn_func(**{"q": Q, "k": V, "v": V, **options})
    assert sentence in str(caught.value)
