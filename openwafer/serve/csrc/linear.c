/* Matrix products of packed weights: one row or tiles of rows, with the same sums in the same order. */
#include "decoder.h"


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
    vf total[TILE_ROWS][VECTORS];
    for (int r = 0; r < R; r++)
        for (int v = 0; v < VECTORS; v++) total[r][v] = splat(0);
    for (int64_t start = 0; start < columns; start += SUM_LENGTH) {
        int64_t stop = start + SUM_LENGTH < columns ? start + SUM_LENGTH : columns;
        vf sum[TILE_ROWS][VECTORS];
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

/* `weights`: 32 inputs of the next STEP outputs, unpacked; `dots` multiplies them with R rows' 32 values. */
#if defined(__ARM_FEATURE_DOTPROD)
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
 * numbers takes four times as long on a Neoverse N1, and chains of products run at full speed only side by side. */
INLINE void dots(const int R, const int is_q4, const weights *w, const int8_t *x, const int32_t *totals, vf *out)
{
    (void)is_q4, (void)totals;
    int8x16_t low[4], high[4];
    int32x4_t s[4];
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
        low[r] = vld1q_s8(x + r * BLOCK);
        high[r] = vld1q_s8(x + r * BLOCK + 16);
        s[r] = vdupq_n_s32(0x4b400000);
    }
#define PRODUCTS(J, X, LANE)    \
    _Pragma("GCC unroll 4")     \
    for (int r = 0; r < R; r++) s[r] = vdotq_laneq_s32(s[r], w->v[J], X[r], LANE);
    PRODUCTS(0, low, 0)
    PRODUCTS(1, low, 1)
    PRODUCTS(2, low, 2)
    PRODUCTS(3, low, 3)
    PRODUCTS(4, high, 0)
    PRODUCTS(5, high, 1)
    PRODUCTS(6, high, 2)
    PRODUCTS(7, high, 3)
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) out[r] = (vf)s[r] - splat(12582912.0f);
}
#elif defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define STEP 16
typedef struct { __m512i v[8]; } weights;

INLINE weights load_weights(const int is_q4, const uint8_t *data, int lane)
{
    (void)lane;
    weights w;
    const __m512i low = _mm512_set1_epi8(15), top = _mm512_set1_epi8((char)0x80);
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
        __m512i bytes = _mm512_loadu_si512((const void *)(data + j * 64));
        if (is_q4) {
            w.v[j] = _mm512_and_si512(bytes, low);
            w.v[j + 4] = _mm512_and_si512(_mm512_srli_epi16(bytes, 4), low);
        } else {
            w.v[j] = _mm512_xor_si512(bytes, top);
            w.v[j + 4] = _mm512_xor_si512(_mm512_loadu_si512((const void *)(data + (j + 4) * 64)), top);
        }
    }
    return w;
}

/* The instruction multiplies unsigned by signed bytes: signed weights were moved up by 128, and 128 times the total of
 * the row's values is taken off again. All of it is exact. */
INLINE void dots(const int R, const int is_q4, const weights *w, const int8_t *x, const int32_t *totals, vf *out)
{
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
        __m512i s = is_q4 ? _mm512_setzero_si512() : _mm512_set1_epi32(-128 * totals[r]);
#pragma GCC unroll 8
        for (int j = 0; j < 8; j++) {
            int32_t four;
            memcpy(&four, x + r * BLOCK + 4 * j, 4);
            s = _mm512_dpbusd_epi32(s, w->v[j], _mm512_set1_epi32(four));
        }
        out[r] = (vf)_mm512_cvtepi32_ps(s);
    }
}
#else
#define STEP LANES
typedef struct { int16_t v[8][4][LANES]; } weights; /* [4 inputs][input][output] */

INLINE weights load_weights(const int is_q4, const uint8_t *data, int lane)
{
    weights w;
    for (int j = 0; j < 8; j++)
        for (int b = 0; b < 4; b++)
            for (int i = 0; i < LANES; i++) {
                int at = (lane + i) * 4 + b;
                if (!is_q4) w.v[j][b][i] = ((const int8_t *)data)[j * 64 + at];
                else w.v[j][b][i] = j < 4 ? data[j * 64 + at] & 15 : data[(j - 4) * 64 + at] >> 4;
            }
    return w;
}

INLINE void dots(const int R, const int is_q4, const weights *w, const int8_t *x, const int32_t *totals, vf *out)
{
    (void)is_q4, (void)totals;
    for (int r = 0; r < R; r++) {
        vi s = { 0 };
        for (int k = 0; k < BLOCK; k++)
            for (int i = 0; i < LANES; i++) s[i] += w->v[k / 4][k % 4][i] * x[r * BLOCK + k];
        out[r] = __builtin_convertvector(s, vf);
    }
}
#endif

/* R rows and Q times STEP outputs from `lane` on, over all blocks; the sums stay in registers. */
INLINE void packed_tile(const int R, const int Q, const int is_q4, const int is_wide, const uint8_t *data,
                        const rounded *in, int row, int64_t blocks, int lane, float *out)
{
    const int head = GROUP * (is_wide ? 4 : 2), record = is_q4 ? 2 * head + 256 : head + 512;
    const int64_t first = rounded_at(in, row, 0);
    const int8_t *x = in->values + first * BLOCK;
    const float *scales = in->scales + first, *sums = in->sums + first;
    const int32_t *totals = in->totals + first;
    vf total[TILE_ROWS][4];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int q = 0; q < Q; q++) total[r][q] = splat(0);
    for (int64_t b = 0; b < blocks; b++) {
#pragma GCC unroll 4
        for (int q = 0; q < Q; q++) {
            weights w = load_weights(is_q4, data + (is_q4 ? 2 : 1) * head, lane + q * STEP);
            vf scale = load_scales(data, is_wide, lane / LANES + q);
            vf offset = is_q4 ? load_scales(data + head, is_wide, lane / LANES + q) : splat(0);
#pragma GCC unroll 2
            for (int start = 0; start < R; start += 4) {
                vf products[4];
                dots(R < 4 ? R : 4, is_q4, &w, x + start * BLOCK, totals + start, products);
#pragma GCC unroll 4
                for (int r = start; r < start + (R < 4 ? R : 4); r++) {
                    total[r][q] = FMA(products[r - start], scale * splat(scales[r]), total[r][q]);
                    if (is_q4) total[r][q] = FMA(offset, splat(sums[r]), total[r][q]);
                }
            }
        }
        data += record;
        x += TILE_ROWS * BLOCK;
        scales += TILE_ROWS;
        sums += TILE_ROWS;
        totals += TILE_ROWS;
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
        int head = GROUP * (m->is_wide ? 4 : 2), record = m->format == FORMAT_Q4 ? 2 * head + 256 : head + 512; \
        const uint8_t *data = (const uint8_t *)m->data + group * blocks * record;                      \
        const int Q = QUARTERS(R);                                                                     \
        for (int lane = 0; lane < GROUP; lane += Q * STEP) {                                           \
            if (m->format == FORMAT_Q4 && !m->is_wide) packed_tile(R, Q, 1, 0, data, &p->quantized, row, blocks, lane, out); \
            else if (m->format == FORMAT_Q4) packed_tile(R, Q, 1, 1, data, &p->quantized, row, blocks, lane, out);    \
            else if (!m->is_wide) packed_tile(R, Q, 0, 0, data, &p->quantized, row, blocks, lane, out);               \
            else packed_tile(R, Q, 0, 1, data, &p->quantized, row, blocks, lane, out);                                \
        }                                                                                              \
    }                                                                                                  \
    int64_t left = m->num_rows - group * GROUP;                                                        \
    for (int r = 0; r < (R); r++) finish(op, row + r, group * GROUP, left < GROUP ? (int)left : GROUP, out + r * GROUP); \
}

TILE(1)
TILE(2)
TILE(4)
TILE(8)

#define NEAR_BYTES 32768 /* of weights that stay in the first cache while the rows go by */

static int64_t group_bytes(const matrix *m)
{
    int64_t blocks = (m->num_columns + BLOCK - 1) / BLOCK, head = GROUP * (m->is_wide ? 4 : 2);
    if (m->format == FORMAT_Q4) return blocks * (2 * head + 256);
    if (m->format == FORMAT_Q8) return blocks * (head + 512);
    return (int64_t)m->num_columns * GROUP * (m->format == FORMAT_FP32 ? 4 : 2);
}

void linear_groups(const program *p, const operation *op, int num_rows, int first, int last)
{
    /* 16 fp32 sums of 8 rows do not fit NEON's registers */
    const int widest = op->weights.format >= FORMAT_Q8 || LANES == 16 ? 8 : 4;
    int near = (int)(NEAR_BYTES / group_bytes(&op->weights));
    if (near < 1) near = 1;
    for (int start = first; start < last; start += near) {
        int stop = start + near < last ? start + near : last, row = 0;
        for (; widest == 8 && row + 8 <= num_rows; row += 8)
            for (int group = start; group < stop; group++) tile_8(p, op, row, group);
        for (; row + 4 <= num_rows; row += 4)
            for (int group = start; group < stop; group++) tile_4(p, op, row, group);
        for (; row + 2 <= num_rows; row += 2)
            for (int group = start; group < stop; group++) tile_2(p, op, row, group);
        for (; row < num_rows; row++)
            for (int group = start; group < stop; group++) tile_1(p, op, row, group);
    }
}
