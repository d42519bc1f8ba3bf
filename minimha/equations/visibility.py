"""Decide whether query i may attend to key j, by one rule for NumPy, numba and CUDA.

Causality, a sliding window and a padded cache are one condition with different bounds. Query i is
at key position p = i + q_offset. It sees the existing keys (j < length) from p - left to p + right,
both inclusive. A causal problem has right = 0, and a side without a limit is ``UNBOUNDED``::

    Lq = Lk = 5              causal         window (1, 0)    window (1, 1)    causal, q_offset = -2
    left, right        UNBOUNDED, 0             1, 0             1, 1          UNBOUNDED, 0

    row: query i        # . . . .        # . . . .        # # . . .        . . . . .
    column: key j       # # . . .        # # . . .        # # # . .        . . . . .
    #: visible          # # # . .        . # # . .        . # # # .        # . . . .
    .: hidden           # # # # .        . . # # .        . . # # #        # # . . .
                        # # # # #        . . . # #        . . . # #        # # # . .

Kernels compile ``sees``, ``key_range``, ``is_full`` and ``query_range`` unchanged, since they are
only arithmetic. ``Problem.visible`` applies the rule and all masks to a grid of queries and keys.
"""

from typing import Any

UNBOUNDED = 1 << 40  # longer than any sequence; a position can be added without overflow


def sees(i: Any, j: Any, q_offset: Any, left: Any, right: Any, length: Any) -> Any:
    """Return whether query ``i`` sees key ``j``, by position and length; arrays broadcast.

    >>> [[int(sees(i, j, 0, UNBOUNDED, 0, 3)) for j in range(3)] for i in range(3)]
    [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    """
    position = i + q_offset
    return (position - left <= j) & (j <= position + right) & (j < length)


def key_range(
    i_start: int, i_stop: int, q_offset: int, left: int, right: int, length: int
) -> tuple[int, int]:
    """Return the range (start, stop) of keys that any query ``i_start <= i < i_stop`` sees.

    The range is half-open, and empty (start >= stop) if no query sees a key.

    >>> key_range(2, 4, 0, 1, 0, 10)  # queries 2 and 3, window (1, 0): keys 1, 2 and 3
    (1, 4)
    """
    start = max(0, i_start + q_offset - left)
    stop = min(length, i_stop - 1 + q_offset + right + 1)
    return start, stop


def is_full(
    i_start: Any, i_stop: Any, j_start: Any, j_stop: Any, q_offset: Any, left: Any, right: Any,
    length: Any,
) -> Any:  # fmt: skip
    """Return whether all queries of a tile see all of its keys, by position and length alone.

    A tile is a block of scores. Kernels skip a tile outside ``key_range``. Any other tile that is
    not full is partial: its scores are checked one by one.

    >>> is_full(2, 4, 0, 3, 0, UNBOUNDED, 0, 10), is_full(2, 4, 0, 4, 0, UNBOUNDED, 0, 10)
    (True, False)
    """
    is_left = i_stop - 1 + q_offset - left <= j_start
    is_right = j_stop - 1 <= i_start + q_offset + right
    return is_left & is_right & (j_stop <= length)


def query_range(j: int, q_offset: int, left: int, right: int, length: int) -> tuple[int, int]:
    """Return the range (start, stop) of queries that see key ``j``, empty if start >= stop.

    >>> query_range(2, 0, 1, 0, 10)  # key 2, window (1, 0): queries 2 and 3
    (2, 4)
    """
    start = max(0, j - q_offset - right)
    return start, (j - q_offset + left + 1 if j < length else start)
