"""Random problems of every form, on every backend: ``python -m tests.fuzz --help``.

A seed and a number replay a problem, without the ones before it. Unlike Hypothesis in the other
tests, which looks for small problems, this draws what small problems do not have: lengths at the
edges of tiles, arrays of any strides against pages that end the process when they are read, NaNs
of any bits, denormal and huge numbers, every ``np.errstate``::

    cases    what a seed and a number draw
    memory   where its arrays lie
    bounds   what any backend must return for it, from dense attention in a wider dtype
    run      one problem on one backend; many, in child processes that may end
    smaller  the smallest problem that fails as one does
"""
