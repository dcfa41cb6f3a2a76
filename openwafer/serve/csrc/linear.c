/* Matrix products of packed weights: one row or tiles of rows, with the same sums in the same order. */
#include "linear.h"

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

#if defined(__ARM_FEATURE_DOTPROD)
#include "dots_neon.h"
#elif defined(__AVX512VNNI__) && defined(__AVX512BW__)
#include "dots_avx512.h"
#else
#include "dots_portable.h"
#endif

/* Adds the products of a block with R rows, at most four. */
INLINE void add_rows(const int R, const int is_q4, const weights *w, const int8_t *x, const float *scales,
                     const float *sums, const int32_t *totals, vf scale, vf offset, vf *total)
{
#if HAS_FOUR_ROWS
    if (R == 4) {
        add_four_rows(is_q4, w, x, scales, sums, scale, offset, total);
        return;
    }
#endif
    vf products[4];
    dots(R, is_q4, w, x, totals, products);
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
        total[r] = FMA(products[r], scale * splat(scales[r]), total[r]);
        if (is_q4) total[r] = FMA(offset, splat(sums[r]), total[r]);
    }
}

/* R rows and Q times STEP outputs from `lane` on, over all blocks; the sums stay in registers. */
INLINE void packed_tile(const int R, const int Q, const int is_q4, const int is_wide, const uint8_t *data,
                        const rounded *in, int row, int64_t blocks, int lane, float *out)
{
    const int head = GROUP * (is_wide ? 4 : 2), record = is_q4 ? 2 * head + 256 : head + 512;
    const int64_t first = rounded_at(in, row, 0);
    const int8_t *x = in->values + first * BLOCK;
    const float *scales = in->scales + first, *sums = in->sums + first;
    const int32_t *totals = in->totals + first;
    vf total[4][TILE_ROWS];
#pragma GCC unroll 4
    for (int q = 0; q < Q; q++)
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) total[q][r] = splat(0);
    for (int64_t b = 0; b < blocks; b++) {
        /* Many rows take so long that memory would rest: the next group is fetched meanwhile. */
        for (int line = 0; R == TILE_ROWS && lane == 0 && line < record; line += 64)
            __builtin_prefetch(data + blocks * record + line, 0, 2);
#pragma GCC unroll 4
        for (int q = 0; q < Q; q++) {
            weights w = load_weights(is_q4, data + (is_q4 ? 2 : 1) * head, lane + q * STEP);
            vf scale = load_scales(data, is_wide, lane / LANES + q);
            vf offset = is_q4 ? load_scales(data + head, is_wide, lane / LANES + q) : splat(0);
#pragma GCC unroll 2
            for (int start = 0; start < R; start += 4)
                add_rows(R < 4 ? R : 4, is_q4, &w, x + start * BLOCK, scales + start, sums + start, totals + start, scale,
                         offset, total[q] + start);
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
        for (int q = 0; q < Q; q++) store(out + r * GROUP + lane + q * STEP, total[q][r]);
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
    int done = 0;
#if HAS_AMX
    /* Two tiles of 8 rows take as long as about 7 rows here. */
    const int rest = num_rows % (2 * TILE_ROWS);
    if (op->weights.format >= FORMAT_Q8 && num_rows >= TILE_ROWS && amx_works()) {
        done = rest < TILE_ROWS ? num_rows - rest : num_rows;
        amx_groups(p, op, done, first, last);
    }
#endif
    for (int start = first; start < last; start += near) {
        int stop = start + near < last ? start + near : last, row = done;
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
