"""Update columns of the delta rule's state S (D, Dv) by up to four tokens at once.

``advance(S, s, s_row, T, t, t_row, R, V, v, v_row, C, c, W, w, P, p, plane, n, D)`` solves for the
u of n ≤ ``GROUP`` tokens, sets their outputs o, and writes the next state to T:

    u_j = β_j (v_j - r_j - Σ_i<j A_ji u_i),   o_j = R_j + Σ_i≤j B_ji u_i
    T = keep ∘ S + e S + Σ_j w_j u_jᵀ

r_j and R_j are the products of S with the key and the query of token j. The rows of R alternate:
r_0, R_0, r_1, R_1, … of these columns. Row j of V, at v + j · v_row, first has v_j, and then o_j. C
has β, A and B at c, all for ``GROUP`` tokens. W has the w_j (D,) at w. P has e (D,) at p and
``keep`` (D,) at p + ``plane``. The bits of each number of ``keep`` are all ones or all zeros. Row d
of S starts at s + d · s_row, and row d of T at t + d · t_row. ``advance_one`` has the same
arguments, but updates by one token, for more columns at once.
"""

from __future__ import annotations

from numba import types
from numba.extending import intrinsic

from minimha.kernels.cpu.simd.vector import INT, REGISTERS, Vector, loop, pointer_to

GROUP = 4  # tokens
NARROW = 2  # vectors of columns: the u of all tokens stay in registers
WIDE = REGISTERS // 4  # vectors for one token, so that rows of S are read in long pieces


def _advance(tokens, vectors):
    @intrinsic
    def advance(typing, S, s, s_row, T, t, t_row, R, V, v, v_row, C, c, W, w, P, p, plane, n, D):
        i = types.intp
        signature = types.void(S, i, i, T, i, i, R, V, i, i, C, i, W, i, P, i, i, i, i)

        def generate(context, builder, signature, arguments):
            kinds, (*_, s_row, _, _, t_row, R, _, _, v_row, _, _, _, w, _, p, plane, n, D) = (
                signature.args, arguments
            )  # fmt: skip
            vector = Vector(kinds[0].dtype)

            def at(array, offset):
                return pointer_to(context, builder, kinds[array], arguments[array], offset)

            S, T, C = at(0, arguments[1]), at(3, arguments[4]), at(10, arguments[11])
            R, V, W = at(6, INT(0)), at(7, arguments[8]), at(12, w)
            e, keep = at(14, p), at(14, builder.add(p, plane))

            def number(index):
                place = builder.gep(C, [INT(index)])
                return vector.splat(builder, builder.load(place))

            us = []  # of all tokens, vector by vector
            for j in range(tokens):
                row = builder.gep(V, [builder.mul(v_row, INT(j))])
                exists = builder.icmp_signed("<", INT(j), n)
                new = []
                for x in range(vectors):
                    r, read = (vector.load(builder, R, (2 * j + m) * vectors + x) for m in (0, 1))
                    found = builder.fsub(vector.load(builder, row, x), r)
                    for i in range(j):
                        factor = builder.fneg(number(GROUP + j * GROUP + i))
                        found = vector.fma(builder, factor, us[i][x], found)
                    u = builder.fmul(number(j), found)
                    new.append(builder.select(exists, u, vector.constant(0.0)))
                    for i, each in enumerate([*us, new]):
                        factor = number(GROUP + GROUP * GROUP + j * GROUP + i)
                        read = vector.fma(builder, factor, each[x], read)
                    vector.store(builder, read, row, x)
                us.append(new)

            def bits(value):
                return builder.bitcast(value, vector.integers)

            def some_row(d, _):
                old, new = (
                    builder.gep(place, [builder.mul(d, stride)])
                    for place, stride in ((S, s_row), (T, t_row))
                )
                factors = [builder.gep(place, [d]) for place in (e, keep)]
                factors += [
                    builder.gep(W, [builder.add(d, builder.mul(D, INT(j)))]) for j in range(tokens)
                ]
                decay, mask, *ws = (vector.splat(builder, builder.load(place)) for place in factors)
                for x in range(vectors):
                    row = vector.load(builder, old, x)
                    kept = builder.bitcast(builder.and_(bits(row), bits(mask)), vector.type)
                    row = vector.fma(builder, decay, row, kept)
                    for each, u in zip(ws, us, strict=True):
                        row = vector.fma(builder, each, u[x], row)
                    vector.store(builder, row, new, x)
                return []

            loop(builder, D, 1, [], some_row)
            return context.get_dummy_value()

        return signature, generate

    return advance


advance, advance_one = _advance(GROUP, NARROW), _advance(1, WIDE)
