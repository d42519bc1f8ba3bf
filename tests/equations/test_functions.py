"""Functions of scores and of pairs, called from NumPy: with arrays, or number by number."""

import math

import numpy as np
import pytest

from minimha import attention
from minimha.equations.functions import contents, uses

RNG = np.random.default_rng(0)
X = RNG.normal(size=(2, 3, 4, 5))
DENSE = ("dense", "tiled")


def scaled(x):
    return x @ x.swapaxes(-1, -2) / math.sqrt(x.shape[-1])


@pytest.mark.parametrize("backend", DENSE)
def test_a_function_with_if_and_math_is_called_number_by_number(backend):
    def score_mod(s, b, h, i, j):
        return math.tanh(s) if i > j else s

    tanh = np.where(np.tri(4, k=-1, dtype=bool), np.tanh(scaled(X)), scaled(X))
    expected = attention(X, X, X, scale=0, attn_bias=tanh)
    got = attention(X, X, X, score_mod=score_mod, backend=backend)
    np.testing.assert_allclose(got, expected, rtol=1e-12)


@pytest.mark.parametrize("backend", DENSE)
def test_queries_are_counted_from_their_offset(backend):
    heard = []

    def mask_mod(b, h, i, j):
        heard.append(np.ravel(i).tolist())
        return i >= j

    got = attention(X[:, :, :2], X, X, mask_mod=mask_mod, q_offset=[0, 2], backend=backend)
    assert heard == [[0, 1, 2, 3]]
    causal = attention(X[:, :, :2], X, X, is_causal=True, q_offset=[0, 2])
    np.testing.assert_allclose(got, causal, rtol=1e-12)


def test_minus_infinity_hides_a_key_and_what_is_wrong_with_its_value():
    v = X.copy()
    v[:, :, 3] = np.nan
    got, lse = attention(
        X, X, v, score_mod=lambda s, b, h, i, j: s if j < 3 and i else -math.inf, return_lse=True
    )
    np.testing.assert_allclose(got[:, :, 1:], attention(X[:, :, 1:], X[:, :, :3], X[:, :, :3]))
    assert not got[:, :, 0].any()
    assert np.isneginf(lse[:, :, 0]).all()


def test_scores_cannot_be_written_to():
    def score_mod(s, b, h, i, j):
        s += 1.0
        return s

    np.testing.assert_allclose(attention(X, X, X, score_mod=score_mod), attention(X, X, X))


WRONG = [
    ({"score_mod": 3}, TypeError, r"score_mod is 3: expected a function score_mod\(score, b, h"),
    ({"score_mod": lambda s, b: s}, TypeError, r"score_mod takes \(s, b\): expected 5 parameters"),
    ({"score_mod": lambda *x: None}, TypeError, "score_mod returned None: expected a real number"),
    ({"score_mod": lambda *x: x[0] + 1j}, TypeError, "score_mod returned complex128: expected"),
    ({"score_mod": lambda *x: x[0] > 0}, TypeError, "score_mod returned bool: expected"),
    ({"score_mod": lambda *x: "a"}, TypeError, "score_mod returned <U1: expected"),
    ({"score_mod": lambda *x: x[0][..., :2]}, ValueError, "score_mod returned shape"),
    ({"mask_mod": lambda s, b, h, i, j: s}, TypeError, "expected 4 parameters, as it is called wi"),
    ({"mask_mod": lambda b, h, i, j: j - i}, TypeError, "mask_mod returned int64: expected bool"),
    ({"mask_mod": lambda b, h, i, j: None if i else True}, TypeError, "mask_mod returned None"),
]


@pytest.mark.parametrize("backend", DENSE)
@pytest.mark.parametrize(("options", "error", "sentence"), WRONG)
def test_wrong_functions_are_refused(options, error, sentence, backend):
    with pytest.raises(error, match=sentence):
        attention(X, X, X, **options, backend=backend)


def test_positions_must_be_known():
    with pytest.raises(ValueError, match="mask_mod with Lq=4 and Lk=3 needs q_offset"):
        attention(X, X[:, :, :3], X[:, :, :3], mask_mod=lambda b, h, i, j: i >= j)


def made(value):
    return lambda s, b, h, i, j: s + value


def test_contents_of_a_function_without_a_module():
    namespace = {"slope": 1}
    exec("def f(score, b, h, i, j): return score - slope * j", namespace)
    before = contents(namespace["f"])
    assert before == contents(namespace["f"])
    namespace["slope"] = 2
    assert before != contents(namespace["f"])


def test_contents_are_equal_where_the_captured_values_are():
    array = np.zeros(3)
    before = contents(made(array))
    assert before == contents(made(np.zeros(3))) != contents(made(np.ones(3)))
    assert contents(made(1)) == contents(made(1)) != contents(made(1.0))
    array[1] = 5
    assert contents(made(array)) != before


def test_contents_tell_the_fields_of_equal_bytes_apart():
    numbers = np.zeros(3, [("a", "i4"), ("b", "f4")])
    swapped = numbers.view([("b", "i4"), ("a", "f4")])
    assert contents(numbers) == contents(numbers.copy()) != contents(swapped)


def test_contents_of_many_functions_that_call_each_other():
    members, table = [], np.zeros(3)
    for n in range(40):
        earlier = tuple(members)
        members.append(lambda x, n=n, earlier=earlier: sum(f(x) for f in earlier) + n + table[0])
    before = contents(members[-1])
    assert hash(before) == hash(contents(members[-1]))
    assert before == contents(members[-1]) != contents(members[-2])
    table[0] = 1
    assert contents(members[-1]) != before


def test_contents_of_a_long_chain_and_of_circles():
    def chain(end):
        function = end
        for _ in range(2000):
            function = lambda x, next=function: next(x)  # noqa: E731
        return function

    assert contents(chain(1)) == contents(chain(1)) != contents(chain(2))

    def even(n):
        return n == 0 or odd(n - 1)

    def odd(n):
        return n != 0 and even(n - 1)

    circle = [even]
    circle.append(circle)
    assert contents(circle) == contents(circle) != contents(odd)


def test_a_variable_that_has_no_value_yet_is_no_mistake_until_it_is_read():
    q = np.ones((1, 2))
    got = attention(q, q, q, score_mod=lambda s, b, h, i, j: s if j >= 0 else later)
    later = 1
    np.testing.assert_array_equal(got, q * later)


def test_which_parameters_are_used():
    def inner(b, h, i, j):
        return (lambda: h > j)()

    assert [uses(lambda b, h, i, j: i >= j - b, n) for n in range(4)] == [True, False, True, True]
    assert uses(inner, 1)
    assert uses(lambda *pair: True, 0)
