/* softmax(scale · Q Kᵀ) V for one query after another, with the online softmax. Arrays are
   contiguous: q (B, H, Lq, D), k (B, Hkv, Lk, D), v (B, Hkv, Lk, Dv), output (B, H, Lq, Dv). */
#include <math.h>
#include <stdint.h>

void attention(const float *q, const float *k, const float *v, float *output, int64_t B, int64_t H,
               int64_t Hkv, int64_t Lq, int64_t Lk, int64_t D, int64_t Dv, float scale,
               int is_causal, int64_t q_offset)
{
    for (int64_t row = 0; row < B * H * Lq; row++) {
        int64_t i = row % Lq, h = row / Lq % H, b = row / (Lq * H);
        int64_t kv_head = b * Hkv + h / (H / Hkv);
        const float *q_row = q + row * D;
        float *o = output + row * Dv, m = -INFINITY, l = 0;
        for (int64_t d = 0; d < Dv; d++)
            o[d] = 0;
        for (int64_t j = 0; j < Lk; j++) {
            if (is_causal && j > i + q_offset)
                break;
            const float *k_row = k + (kv_head * Lk + j) * D, *v_row = v + (kv_head * Lk + j) * Dv;
            float s = 0;
            for (int64_t d = 0; d < D; d++)
                s += q_row[d] * k_row[d];
            s *= scale;
            float m_new = fmaxf(m, s), alpha = expf(m - m_new), p = expf(s - m_new);
            l = l * alpha + p;
            for (int64_t d = 0; d < Dv; d++)
                o[d] = o[d] * alpha + p * v_row[d];
            m = m_new;
        }
        for (int64_t d = 0; d < Dv && l > 0; d++)
            o[d] /= l;
    }
}
