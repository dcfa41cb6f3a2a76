/* Matrix products of packed weights: one row or tiles of rows, with the same sums in the same order. */
#include "decoder.h"

#define MOST_ROWS 8 /* rows of a tile; the 4 x 8 sums of a quarter group fill NEON's registers */

INLINE vf load_scales(const uint8_t *p, int is_wide, int v)
{
    return is_wide ? load((const float *)p + v * LANES) : load_half((const half_t *)p + v * LANES);
}

INLINE void finish(const operation *op, int row, int64_t output, int count, const float *sums)
{
    float *out = op->dst.base + row * op->dst.stride + output;
    if (op->vector && op->flags)
        for (int i = 0; i < count; i++) out[i] += sums[i] + op->vector[output + i];
    else if (op->vector)
        for (int i = 0; i < count; i++) out[i] = sums[i] + op->vector[output + i];
    else if (op->flags)
        for (int i = 0; i < count; i++) out[i] += sums[i];
    else
        for (int i = 0; i < count; i++) out[i] = sums[i];
}

/* Sums of R rows and one group over fp32, bf16 or fp16 weights. */
INLINE void float_tile(const int R, const int format, const void *data, int64_t columns, const float *const *x, float *out)
{
    vf total[MOST_ROWS][VECTORS];
    for (int r = 0; r < R; r++)
        for (int v = 0; v < VECTORS; v++) total[r][v] = splat(0);
    for (int64_t start = 0; start < columns; start += SUM_LENGTH) {
        int64_t stop = start + SUM_LENGTH < columns ? start + SUM_LENGTH : columns;
        vf sum[MOST_ROWS][VECTORS];
#pragma GCC unroll 8
        for (int r = 0; r < R; r++)
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) sum[r][v] = splat(0);
        for (int64_t k = start; k < stop; k++) {
            vf w[VECTORS];
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) {
                int64_t at = k * GROUP + v * LANES;
                w[v] = format == FORMAT_FP32 ? load((const float *)data + at)
                     : format == FORMAT_FP16 ? load_half((const half_t *)data + at)
                                             : load_bf16((const half_t *)data + at);
            }
#pragma GCC unroll 8
            for (int r = 0; r < R; r++)
#pragma GCC unroll 4
                for (int v = 0; v < VECTORS; v++) sum[r][v] = FMA(splat(x[r][k]), w[v], sum[r][v]);
        }
        for (int r = 0; r < R; r++)
            for (int v = 0; v < VECTORS; v++) total[r][v] += sum[r][v];
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < VECTORS; v++) store(out + r * GROUP + v * LANES, total[r][v]);
}

/* Whole-number products of the 4 (NEON) or 16 outputs from `lane` on, for R rows and one block; w is the block's
 * weights, x the rows' values. */
#if defined(__ARM_FEATURE_DOTPROD)
#define STEP 4
typedef int32x4_t sums_t;
#define DOTS(R, ISUM, IS_Q4, W, LANE, XS, TOTALS)                                                      \
    do {                                                                                               \
        int8x16_t w_[8];                                                                               \
        if (IS_Q4) {                                                                                   \
            _Pragma("GCC unroll 4") for (int j = 0; j < 4; j++) {                                      \
                uint8x16_t both = vld1q_u8((W) + j * 64 + (LANE) * 4);                                 \
                w_[j] = vreinterpretq_s8_u8(vandq_u8(both, vdupq_n_u8(15)));                           \
                w_[j + 4] = vreinterpretq_s8_u8(vshrq_n_u8(both, 4));                                  \
            }                                                                                          \
        } else {                                                                                       \
            _Pragma("GCC unroll 8") for (int j = 0; j < 8; j++)                                        \
                w_[j] = vld1q_s8((const int8_t *)(W) + j * 64 + (LANE) * 4);                           \
        }                                                                                              \
        _Pragma("GCC unroll 8") for (int r = 0; r < (R); r++) {                                        \
            int8x16_t low = vld1q_s8((XS)[r]), high = vld1q_s8((XS)[r] + 16);                          \
            int32x4_t s = vdupq_n_s32(0);                                                              \
            s = vdotq_laneq_s32(s, w_[0], low, 0);                                                     \
            s = vdotq_laneq_s32(s, w_[1], low, 1);                                                     \
            s = vdotq_laneq_s32(s, w_[2], low, 2);                                                     \
            s = vdotq_laneq_s32(s, w_[3], low, 3);                                                     \
            s = vdotq_laneq_s32(s, w_[4], high, 0);                                                    \
            s = vdotq_laneq_s32(s, w_[5], high, 1);                                                    \
            s = vdotq_laneq_s32(s, w_[6], high, 2);                                                    \
            s = vdotq_laneq_s32(s, w_[7], high, 3);                                                    \
            (ISUM)[r] = s;                                                                             \
        }                                                                                              \
    } while (0)
INLINE vf as_floats(sums_t s) { return (vf)vcvtq_f32_s32(s); }
#elif defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define STEP 16
typedef __m512i sums_t;
/* The instruction multiplies unsigned by signed bytes: signed weights are moved up by 128, and 128 times the sum of
 * the row's values is taken off again. All of it is exact. */
#define DOTS(R, ISUM, IS_Q4, W, LANE, XS, TOTALS)                                                      \
    do {                                                                                               \
        __m512i w_[8];                                                                                 \
        _Pragma("GCC unroll 8") for (int j = 0; j < ((IS_Q4) ? 4 : 8); j++) {                          \
            __m512i both = _mm512_loadu_si512((const void *)((W) + j * 64));                           \
            if (IS_Q4) {                                                                               \
                w_[j] = _mm512_and_si512(both, _mm512_set1_epi8(15));                                  \
                w_[j + 4] = _mm512_and_si512(_mm512_srli_epi16(both, 4), _mm512_set1_epi8(15));        \
            } else {                                                                                   \
                w_[j] = _mm512_xor_si512(both, _mm512_set1_epi8((char)0x80));                          \
            }                                                                                          \
        }                                                                                              \
        _Pragma("GCC unroll 8") for (int r = 0; r < (R); r++) {                                        \
            __m512i s = _mm512_set1_epi32((IS_Q4) ? 0 : -128 * (TOTALS)[r]);                           \
            _Pragma("GCC unroll 8") for (int j = 0; j < 8; j++) {                                      \
                int32_t four;                                                                          \
                memcpy(&four, (XS)[r] + 4 * j, 4);                                                     \
                s = _mm512_dpbusd_epi32(s, w_[j], _mm512_set1_epi32(four));                            \
            }                                                                                          \
            (ISUM)[r] = s;                                                                             \
        }                                                                                              \
    } while (0)
INLINE vf as_floats(sums_t s) { return (vf)_mm512_cvtepi32_ps(s); }
#else
#define STEP LANES
typedef vi sums_t;
#define DOTS(R, ISUM, IS_Q4, W, LANE, XS, TOTALS)                                                      \
    do {                                                                                               \
        for (int r = 0; r < (R); r++) {                                                                \
            int32_t s[LANES] = { 0 };                                                                  \
            for (int j = 0; j < 8; j++)                                                                \
                for (int i = 0; i < LANES; i++)                                                        \
                    for (int b = 0; b < 4; b++) {                                                      \
                        int at = ((LANE) + i) * 4 + b;                                                 \
                        int q = (IS_Q4) ? (j < 4 ? (W)[j * 64 + at] & 15 : (W)[(j - 4) * 64 + at] >> 4) \
                                        : ((const int8_t *)(W))[j * 64 + at];                          \
                        s[i] += q * (XS)[r][4 * j + b];                                                \
                    }                                                                                  \
            memcpy(&(ISUM)[r], s, sizeof s);                                                           \
        }                                                                                              \
    } while (0)
INLINE vf as_floats(sums_t s) { return __builtin_convertvector(s, vf); }
#endif

/* Values, scales and sums of the rows of a tile. */
typedef struct {
    const int8_t *x[MOST_ROWS];
    const float *scales[MOST_ROWS], *sums[MOST_ROWS];
    const int32_t *totals[MOST_ROWS];
} inputs;

/* R rows and Q times STEP outputs from `lane` on, over all blocks; the sums stay in registers. */
INLINE void packed_tile(const int R, const int Q, const int is_q4, const int is_wide, const uint8_t *data,
                        int64_t blocks, int lane, const inputs *in, float *out)
{
    const int head = GROUP * (is_wide ? 4 : 2), record = is_q4 ? 2 * head + 256 : head + 512;
    vf total[MOST_ROWS][4];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int q = 0; q < Q; q++) total[r][q] = splat(0);
    for (int64_t b = 0; b < blocks; b++) {
        const uint8_t *at = data + b * record;
        const int8_t *xs[MOST_ROWS];
        int32_t totals[MOST_ROWS];
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            xs[r] = in->x[r] + b * BLOCK;
            totals[r] = in->totals[r][b];
        }
        (void)totals;
#pragma GCC unroll 4
        for (int q = 0; q < Q; q++) {
            sums_t whole[MOST_ROWS];
            DOTS(R, whole, is_q4, at + (is_q4 ? 2 : 1) * head, lane + q * STEP, xs, totals);
            vf scale = load_scales(at, is_wide, lane / LANES + q);
            vf offset = is_q4 ? load_scales(at + head, is_wide, lane / LANES + q) : splat(0);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                total[r][q] = FMA(as_floats(whole[r]), scale * splat(in->scales[r][b]), total[r][q]);
                if (is_q4) total[r][q] = FMA(offset, splat(in->sums[r][b]), total[r][q]);
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int q = 0; q < Q; q++) store(out + r * GROUP + lane + q * STEP, total[r][q]);
}

/* Few rows take all outputs of a group at once, so that memory is read in order; many rows have no registers left. */
#define QUARTERS(R) ((R) * (GROUP / STEP) <= 8 ? GROUP / STEP : 8 / (R))

#define TILE(R) static __attribute__((noinline)) void tile_##R(const program *p, const operation *op, int row, int64_t group) \
{                                                                                                      \
    const matrix *m = &op->weights;                                                                    \
    int64_t columns = m->num_columns, blocks = (columns + BLOCK - 1) / BLOCK;                          \
    float out[(R) * GROUP];                                                                            \
    if (m->format < FORMAT_Q8) {                                                                       \
        const float *x[R];                                                                             \
        for (int r = 0; r < (R); r++) x[r] = op->src.base + (row + r) * op->src.stride;                \
        const char *data = (const char *)m->data + group * columns * GROUP * (m->format == FORMAT_FP32 ? 4 : 2); \
        if ((R) * VECTORS > 16) __builtin_unreachable(); /* such tiles are never asked for */          \
        if (m->format == FORMAT_FP32) float_tile(R, FORMAT_FP32, data, columns, x, out);               \
        else if (m->format == FORMAT_FP16) float_tile(R, FORMAT_FP16, data, columns, x, out);          \
        else float_tile(R, FORMAT_BF16, data, columns, x, out);                                        \
    } else {                                                                                           \
        inputs in;                                                                                     \
        for (int r = 0; r < (R); r++) {                                                                \
            int64_t at = (row + r) * p->quantized.block_stride;                                        \
            in.x[r] = p->quantized.values + (row + r) * p->quantized.stride;                           \
            in.scales[r] = p->quantized.scales + at;                                                   \
            in.sums[r] = p->quantized.sums + at;                                                       \
            in.totals[r] = p->quantized.totals + at;                                                   \
        }                                                                                              \
        int head = GROUP * (m->is_wide ? 4 : 2), record = m->format == FORMAT_Q4 ? 2 * head + 256 : head + 512; \
        const uint8_t *data = (const uint8_t *)m->data + group * blocks * record;                      \
        const int Q = QUARTERS(R);                                                                     \
        for (int lane = 0; lane < GROUP; lane += Q * STEP) {                                           \
            if (m->format == FORMAT_Q4 && !m->is_wide) packed_tile(R, Q, 1, 0, data, blocks, lane, &in, out); \
            else if (m->format == FORMAT_Q4) packed_tile(R, Q, 1, 1, data, blocks, lane, &in, out);    \
            else if (!m->is_wide) packed_tile(R, Q, 0, 0, data, blocks, lane, &in, out);               \
            else packed_tile(R, Q, 0, 1, data, blocks, lane, &in, out);                                \
        }                                                                                              \
    }                                                                                                  \
    int64_t left = m->num_rows - group * GROUP;                                                        \
    for (int r = 0; r < (R); r++) finish(op, row + r, group * GROUP, left < GROUP ? (int)left : GROUP, out + r * GROUP); \
}

TILE(1)
TILE(2)
TILE(4)
TILE(8)

void linear_groups(const program *p, const operation *op, int num_rows, int first, int last)
{
    for (int64_t group = first; group < last; group++) {
        int row = 0;
        /* 16 fp32 sums of 8 rows do not fit NEON's registers */
        const int widest = op->weights.format < FORMAT_Q8 && LANES < 16 ? 4 : 8;
        for (; widest == 8 && row + 8 <= num_rows; row += 8) tile_8(p, op, row, group);
        for (; row + 4 <= num_rows; row += 4) tile_4(p, op, row, group);
        for (; row + 2 <= num_rows; row += 2) tile_2(p, op, row, group);
        for (; row < num_rows; row++) tile_1(p, op, row, group);
    }
}
