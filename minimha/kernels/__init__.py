"""The ladder: how fast attention can be computed, one rung a file, one idea a rung.

A rung is a module with ``unsupported(problem)`` and ``forward(problem)``, and all rungs pass the
same tests as the equations. Nothing is imported before it is used, since numba takes its time.
"""

LADDER = {
    "cpu1_rows": "one query and one key at a time, the online softmax",
    "cpu2_tiles": "blocks of queries against blocks of keys: Algorithm 1",
    "cpu3_vector_tiles": "queries across the lanes of vectors, sums in registers",
    "cpu4_parallel": "every core; only the tiles that some query sees",
    "cpu5_decode": "few queries: the keys are split, K and V are read once",
}
FEW_QUERIES = 8  # up to here reading K and V is the work, and lanes full of queries do not pay
