/* Products of blocks with NEON's dot products; dots_portable.h says what they are. */
#ifndef DOTS_NEON_H
#define DOTS_NEON_H

#include "decoder.h"

#define STEP 4
typedef struct { int8x16_t v[8]; } weights;

INLINE weights load_weights(const int is_q4, const uint8_t *data, int lane)
{
    weights w;
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
        uint8x16_t bytes = vld1q_u8(data + j * 64 + lane * 4);
        uint8x16_t more = is_q4 ? vshrq_n_u8(bytes, 4) : vld1q_u8(data + (j + 4) * 64 + lane * 4);
        w.v[j] = vreinterpretq_s8_u8(is_q4 ? vandq_u8(bytes, vdupq_n_u8(15)) : bytes);
        w.v[j + 4] = vreinterpretq_s8_u8(more);
    }
    return w;
}

/* The sums start at the bits of 1.5 * 2**23: below 2**22 each then is the float of that plus the sum. Converting whole
 * numbers takes four times as long on a Neoverse N1. */
INLINE void dots(const int R, const int is_q4, const weights *w, const int8_t *x, const int32_t *totals, vf *out)
{
    (void)is_q4, (void)totals;
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
        const int8x16_t low = vld1q_s8(x + r * BLOCK), high = vld1q_s8(x + r * BLOCK + 16);
        int32x4_t s = vdupq_n_s32(0x4b400000);
        s = vdotq_laneq_s32(s, w->v[0], low, 0);
        s = vdotq_laneq_s32(s, w->v[1], low, 1);
        s = vdotq_laneq_s32(s, w->v[2], low, 2);
        s = vdotq_laneq_s32(s, w->v[3], low, 3);
        s = vdotq_laneq_s32(s, w->v[4], high, 0);
        s = vdotq_laneq_s32(s, w->v[5], high, 1);
        s = vdotq_laneq_s32(s, w->v[6], high, 2);
        s = vdotq_laneq_s32(s, w->v[7], high, 3);
        out[r] = (vf)s - splat(12582912.0f);
    }
}

/* `add_rows` for four rows, with nothing in it that a Neoverse N1's two units could be spared: sums start from memory
 * and not from another register, four chains of products run side by side, and scales are taken from lanes. Compilers
 * did none of that, and a prompt took 12 % longer. */
#define HAS_FOUR_ROWS 1
static const int32_t sums_start[4] = { 0x4b400000, 0x4b400000, 0x4b400000, 0x4b400000 };

INLINE void add_four_rows(const int is_q4, const weights *w, const int8_t *x, const float *scales, const float *sums,
                          vf scale, vf offset, vf *total)
{
    const vf less = splat(-12582912.0f);
    vf s, t, u, v, a, b, c, d;
#define FOUR(J, LANE)                                                                                       \
    "sdot %[s].4s, %[w" #J "].16b, %[a].4b[" #LANE "]\n sdot %[t].4s, %[w" #J "].16b, %[b].4b[" #LANE "]\n" \
    "sdot %[u].4s, %[w" #J "].16b, %[c].4b[" #LANE "]\n sdot %[v].4s, %[w" #J "].16b, %[d].4b[" #LANE "]\n"
    __asm__("ldr %q[a], [%[x]]\n ldr %q[b], [%[x], #32]\n ldr %q[c], [%[x], #64]\n ldr %q[d], [%[x], #96]\n"
            "ldr %q[s], [%[start]]\n ldr %q[t], [%[start]]\n ldr %q[u], [%[start]]\n ldr %q[v], [%[start]]\n"
            FOUR(0, 0) FOUR(1, 1) FOUR(2, 2) FOUR(3, 3)
            "ldr %q[a], [%[x], #16]\n ldr %q[b], [%[x], #48]\n ldr %q[c], [%[x], #80]\n ldr %q[d], [%[x], #112]\n"
            FOUR(4, 0) FOUR(5, 1) FOUR(6, 2) FOUR(7, 3)
            "fadd %[s].4s, %[s].4s, %[less].4s\n fadd %[t].4s, %[t].4s, %[less].4s\n"
            "fadd %[u].4s, %[u].4s, %[less].4s\n fadd %[v].4s, %[v].4s, %[less].4s\n"
            : [s] "=&w"(s), [t] "=&w"(t), [u] "=&w"(u), [v] "=&w"(v), [a] "=&w"(a), [b] "=&w"(b), [c] "=&w"(c),
              [d] "=&w"(d)
            : [w0] "w"(w->v[0]), [w1] "w"(w->v[1]), [w2] "w"(w->v[2]), [w3] "w"(w->v[3]), [w4] "w"(w->v[4]),
              [w5] "w"(w->v[5]), [w6] "w"(w->v[6]), [w7] "w"(w->v[7]), [x] "r"(x), [start] "r"(sums_start),
              [less] "w"(less), "m"(*(const int8_t(*)[4 * BLOCK])x), "m"(sums_start));
#undef FOUR
#define SCALED                                                                             \
    "ldr %q[d], [%[scales]]\n"                                                             \
    "fmul %[a].4s, %[scale].4s, %[d].s[0]\n fmul %[b].4s, %[scale].4s, %[d].s[1]\n"     \
    "fmul %[c].4s, %[scale].4s, %[d].s[2]\n fmul %[d].4s, %[scale].4s, %[d].s[3]\n"     \
    "fmla %[k].4s, %[s].4s, %[a].4s\n fmla %[l].4s, %[t].4s, %[b].4s\n"                 \
    "fmla %[m].4s, %[u].4s, %[c].4s\n fmla %[n].4s, %[v].4s, %[d].4s\n"
#define OFFSETS                                                                            \
    "ldr %q[a], [%[sums]]\n"                                                               \
    "fmla %[k].4s, %[offset].4s, %[a].s[0]\n fmla %[l].4s, %[offset].4s, %[a].s[1]\n"   \
    "fmla %[m].4s, %[offset].4s, %[a].s[2]\n fmla %[n].4s, %[offset].4s, %[a].s[3]\n"
#define OPERANDS                                                                                                       \
    [k] "+&w"(total[0]), [l] "+&w"(total[1]), [m] "+&w"(total[2]), [n] "+&w"(total[3]), [a] "=&w"(a), [b] "=&w"(b),   \
    [c] "=&w"(c), [d] "=&w"(d)                                                                                         \
    : [s] "w"(s), [t] "w"(t), [u] "w"(u), [v] "w"(v), [scale] "w"(scale), [offset] "w"(offset), [scales] "r"(scales), \
      [sums] "r"(sums), "m"(*(const float(*)[4])scales), "m"(*(const float(*)[4])sums)
    if (is_q4) __asm__(SCALED OFFSETS : OPERANDS);
    else __asm__(SCALED : OPERANDS);
#undef SCALED
#undef OFFSETS
#undef OPERANDS
}

#endif
