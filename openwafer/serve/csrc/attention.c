/* Attention of rows over their own sequences, through the block tables of the cache.
 *
 * Scores of all positions first, then the softmax, then the sum of the values, each along the positions in order:
 * where a prompt was cut into pieces leaves no trace. Keys lie as [head_size][PAGE], so a vector holds the scores of
 * neighbouring tokens; values lie as [PAGE][head_size]. */
#include "decoder.h"
#include <math.h>

#define MOST_QUERIES 4

INLINE int64_t page_index(const program *p, const batch *in, int layer, int is_value, int sequence, int page, int head)
{
    int64_t block = in->tables[(int64_t)sequence * in->table_width + page];
    return ((((int64_t)layer * 2 + is_value) * p->num_blocks + block) * p->num_kv_heads + head) * p->head_size * PAGE;
}

INLINE vf load_cache(const program *p, int64_t at)
{
    return p->cache_is_half ? load_half((const half_t *)p->cache + at) : load((const float *)p->cache + at);
}

/* LANES values of a token, or the `left` ones that are left of a head. */
INLINE vf load_values(const program *p, int64_t at, int left)
{
    if (left >= LANES) return load_cache(p, at);
    half_t halves[LANES] = { 0 };
    vf out = splat(0);
    for (int i = 0; i < left; i++) {
        if (p->cache_is_half) halves[i] = ((const half_t *)p->cache)[at + i];
        else out[i] = ((const float *)p->cache)[at + i];
    }
    return p->cache_is_half ? load_half(halves) : out;
}

static void rotate(const program *p, const operation *op, int row, float *x)
{
    int half = p->head_size / 2;
    const float *cosines = p->cosines + op->width * p->rotary_stride + row * half;
    const float *sines = cosines + p->rotary_stride / 2;
    for (int i = 0; i < half; i++) {
        float first = x[i], second = x[i + half];
        x[i] = first * cosines[i] - second * sines[i];
        x[i + half] = second * cosines[i] + first * sines[i];
    }
}

/* Turn q and k of one key/value head of a row, and store k and v. */
static void store_head(const program *p, const operation *op, const batch *in, int row, int head)
{
    int size = p->head_size, per_head = p->num_heads / p->num_kv_heads, position = in->positions[row];
    float *q = op->src.base + row * op->src.stride + head * per_head * size;
    float *k = op->src.base + row * op->src.stride + (p->num_heads + head) * size;
    const float *v = k + p->num_kv_heads * size;
    if (op->vector) {
        for (int i = 0; i < per_head; i++) rotate(p, op, row, q + i * size);
        rotate(p, op, row, k);
    }
    int page = position / PAGE, slot = position % PAGE;
    int64_t keys = page_index(p, in, op->layer, 0, in->sequences[row], page, head) + slot;
    int64_t values = page_index(p, in, op->layer, 1, in->sequences[row], page, head) + slot * size;
    if (p->cache_is_half) {
        half_t *cache = p->cache;
        for (int i = 0; i < size; i++) cache[keys + i * PAGE] = to_half(k[i]);
        for (int i = 0; i < size; i++) cache[values + i] = to_half(v[i]);
    } else {
        float *cache = p->cache;
        for (int i = 0; i < size; i++) cache[keys + i * PAGE] = k[i];
        for (int i = 0; i < size; i++) cache[values + i] = v[i];
    }
}

void store_row(const program *p, const operation *op, const batch *in, int row)
{
    for (int head = 0; head < p->num_kv_heads; head++) store_head(p, op, in, row, head);
}

/* Scores of N queries of one row over the positions from `first` (a multiple of PAGE) to `position`. */
INLINE void scores_of(const int N, const program *p, const operation *op, const batch *in, int row, int head, int first,
                      const float *q, float *scores)
{
    int position = in->positions[row], size = p->head_size;
    for (int start = first; start <= position; start += PAGE) {
        int64_t keys = page_index(p, in, op->layer, 0, in->sequences[row], start / PAGE, head);
        vf sum[MOST_QUERIES][VECTORS];
#pragma GCC unroll 4
        for (int n = 0; n < N; n++)
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) sum[n][v] = splat(0);
        for (int i = 0; i < size; i++) {
            vf k[VECTORS];
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) k[v] = load_cache(p, keys + i * PAGE + v * LANES);
#pragma GCC unroll 4
            for (int n = 0; n < N; n++)
#pragma GCC unroll 4
                for (int v = 0; v < VECTORS; v++) sum[n][v] = FMA(splat(q[n * size + i]), k[v], sum[n][v]);
        }
#pragma GCC unroll 4
        for (int n = 0; n < N; n++)
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++)
                store(scores + n * p->scores_stride / MOST_QUERIES + start - first + v * LANES, sum[n][v] * splat(op->scale));
    }
}

/* exp(score - largest) in place; gives the sum. What lies outside the window or after the row becomes 0. */
static float softmax_of(float *scores, int first, int visible, int position)
{
    int padded = (position - first + PAGE) / PAGE * PAGE;
    for (int i = 0; i < visible - first; i++) scores[i] = -INFINITY;
    for (int i = position - first + 1; i < padded; i++) scores[i] = -INFINITY;
    float largest = -INFINITY;
    for (int i = 0; i < padded; i++) largest = scores[i] > largest ? scores[i] : largest;
    vf sum[VECTORS] = { 0 };
    for (int i = 0; i < padded; i += PAGE)
        for (int v = 0; v < VECTORS; v++) {
            vf e = exp_of(load(scores + i + v * LANES) - splat(largest));
            store(scores + i + v * LANES, e);
            sum[v] += e;
        }
    return sum_lanes(sum, VECTORS);
}

/* Sums of the values of N queries. */
INLINE void values_of(const int N, const program *p, const operation *op, const batch *in, int row, int head, int first,
                      const float *scores, const float *sums, float *out)
{
    int position = in->positions[row], size = p->head_size;
    for (int d = 0; d < size; d += LANES) {
        vf sum[MOST_QUERIES];
#pragma GCC unroll 4
        for (int n = 0; n < N; n++) sum[n] = splat(0);
        for (int start = first; start <= position; start += PAGE) {
            int64_t values = page_index(p, in, op->layer, 1, in->sequences[row], start / PAGE, head) + d;
            int last = position - start < PAGE - 1 ? position - start : PAGE - 1;
            for (int t = 0; t <= last; t++) {
                vf value = load_values(p, values + t * size, size - d);
#pragma GCC unroll 4
                for (int n = 0; n < N; n++) {
                    float weight = scores[n * p->scores_stride / MOST_QUERIES + start - first + t];
                    sum[n] = FMA(splat(weight), value, sum[n]);
                }
            }
        }
#pragma GCC unroll 4
        for (int n = 0; n < N; n++) {
            vf result = sum[n] / splat(sums[n]);
            if (d + LANES <= size) store(out + n * size + d, result);
            else for (int i = 0; d + i < size; i++) out[n * size + d + i] = result[i];
        }
    }
}

#define QUERIES(N)                                                                                     \
    static __attribute__((noinline)) void queries_##N(const program *p, const operation *op, const batch *in, int row, \
                                                      int head, const float *q, float *out, float *scores) \
    {                                                                                                  \
        int position = in->positions[row];                                                             \
        int visible = op->window && position >= op->window ? position - op->window + 1 : 0;            \
        int first = visible / PAGE * PAGE;                                                             \
        float sums[N];                                                                                 \
        scores_of(N, p, op, in, row, head, first, q, scores);                                          \
        for (int n = 0; n < (N); n++)                                                                  \
            sums[n] = softmax_of(scores + n * p->scores_stride / MOST_QUERIES, first, visible, position); \
        values_of(N, p, op, in, row, head, first, scores, sums, out);                                  \
    }

QUERIES(1)
QUERIES(2)
QUERIES(3)
QUERIES(4)

void attend_task(const program *p, const operation *op, const batch *in, int task, float *scores)
{
    int row = task / p->num_kv_heads, head = task % p->num_kv_heads;
    int size = p->head_size, per_head = p->num_heads / p->num_kv_heads;
    if (!in->has_runs) store_head(p, op, in, row, head);
    const float *q = op->src.base + row * op->src.stride + head * per_head * size;
    float *out = op->dst.base + row * op->dst.stride + head * per_head * size;
    int n = 0;
    for (; n + 4 <= per_head; n += 4) queries_4(p, op, in, row, head, q + n * size, out + n * size, scores);
    if (per_head - n == 3) queries_3(p, op, in, row, head, q + n * size, out + n * size, scores);
    if (per_head - n == 2) queries_2(p, op, in, row, head, q + n * size, out + n * size, scores);
    if (per_head - n == 1) queries_1(p, op, in, row, head, q + n * size, out + n * size, scores);
    if (op->quantizes)
        quantize(&p->quantized, row, op->dst.base + row * op->dst.stride, head * per_head * size, per_head * size);
}
