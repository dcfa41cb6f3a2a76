/* Attention of rows over their own sequences, through the block tables of the cache.
 *
 * Scores of all positions first, then the softmax, then the sum of the values, each along the positions in order:
 * where a prompt was cut into pieces leaves no trace. A task is a run of rows of one sequence and one key/value head,
 * so that a page is read and widened to fp32 once for all of its queries (rows times query heads of that head).
 * Keys lie as [head_size][PAGE], so a vector holds the scores of neighbouring tokens; values lie as [PAGE][head_size]. */
#include "decoder.h"
#include <math.h>

/* At once: their 4 x 16 sums fill half of NEON's registers. One vector of 16 needs 8 of them to keep two units busy. */
#define QUERIES (LANES == 16 ? 8 : 4)
INLINE int at_once(int left) { return left >= QUERIES ? QUERIES : left > 4 ? 4 : left; }

INLINE int64_t page_index(const program *p, const batch *in, int layer, int is_value, int sequence, int page, int head)
{
    int64_t block = in->tables[(int64_t)sequence * in->table_width + page];
    return ((((int64_t)layer * 2 + is_value) * p->num_blocks + block) * p->num_kv_heads + head) * p->head_size * PAGE;
}

/* A page in fp32: where it lies, or widened into `space`. */
static const float *page_values(const program *p, int64_t at, float *space)
{
    if (!p->cache_is_half) return (const float *)p->cache + at;
    const half_t *from = (const half_t *)p->cache + at;
    int count = p->head_size * PAGE;
    for (int i = 0; i < count; i += LANES) store(space + i, load_half(from + i));
    return space;
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

/* Scores of N queries and one page. */
INLINE void page_scores(const int N, const float *keys, int size, const float *const *q, float scale, float *const *out)
{
    vf sum[QUERIES][VECTORS];
#pragma GCC unroll 8
    for (int n = 0; n < N; n++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) sum[n][v] = splat(0);
    for (int i = 0; i < size; i++) {
#pragma GCC unroll 8
        for (int n = 0; n < N; n++)
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++)
                sum[n][v] = FMA(splat(q[n][i]), load(keys + i * PAGE + v * LANES), sum[n][v]);
    }
#pragma GCC unroll 8
    for (int n = 0; n < N; n++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) store(out[n] + v * LANES, sum[n][v] * splat(scale));
}

/* out += the first `count` values of a page, weighted, of N queries and WIDTH columns. */
INLINE void page_sums(const int N, const int WIDTH, const float *values, int size, int count,
                      const float *const *weights, float *const *out)
{
    vf sum[QUERIES][WIDTH];
#pragma GCC unroll 8
    for (int n = 0; n < N; n++)
#pragma GCC unroll 4
        for (int v = 0; v < WIDTH; v++) sum[n][v] = load(out[n] + v * LANES);
    for (int t = 0; t < count; t++) {
#pragma GCC unroll 8
        for (int n = 0; n < N; n++)
#pragma GCC unroll 4
            for (int v = 0; v < WIDTH; v++)
                sum[n][v] = FMA(splat(weights[n][t]), load(values + t * size + v * LANES), sum[n][v]);
    }
#pragma GCC unroll 8
    for (int n = 0; n < N; n++)
#pragma GCC unroll 4
        for (int v = 0; v < WIDTH; v++) store(out[n] + v * LANES, sum[n][v]);
}

static void sums_of(const int N, const float *values, int size, int count, const float *const *weights, float *const *out)
{
    int d = 0;
    float *at[QUERIES];
    for (; d + GROUP <= size; d += GROUP) {
        for (int n = 0; n < N; n++) at[n] = out[n] + d;
        if (QUERIES == 8 && N == 8) page_sums(8, VECTORS, values + d, size, count, weights, at);
        else if (N == 4) page_sums(4, VECTORS, values + d, size, count, weights, at);
        else if (N == 3) page_sums(3, VECTORS, values + d, size, count, weights, at);
        else if (N == 2) page_sums(2, VECTORS, values + d, size, count, weights, at);
        else page_sums(1, VECTORS, values + d, size, count, weights, at);
    }
    for (; d < size; d++) /* heads that do not fill a group */
        for (int n = 0; n < N; n++)
            for (int t = 0; t < count; t++)
                out[n][d] = FMA(splat(weights[n][t]), splat(values[t * size + d]), splat(out[n][d]))[0];
}

static void scores_of(const int N, const float *keys, int size, const float *const *q, float scale, float *const *out)
{
    if (QUERIES == 8 && N == 8) page_scores(8, keys, size, q, scale, out);
    else if (N == 4) page_scores(4, keys, size, q, scale, out);
    else if (N == 3) page_scores(3, keys, size, q, scale, out);
    else if (N == 2) page_scores(2, keys, size, q, scale, out);
    else page_scores(1, keys, size, q, scale, out);
}

/* exp(score - largest) in place; gives the sum. `visible` to `position` are seen, the rest of the pages becomes 0. */
static float softmax_of(float *scores, int first, int visible, int position, int padded)
{
    for (int i = 0; i < visible - first; i++) scores[i] = -INFINITY;
    for (int i = position - first + 1; i < padded; i++) scores[i] = -INFINITY;
    vf most = splat(-INFINITY);
    for (int i = 0; i < padded; i += LANES) most = larger(load(scores + i), most);
    const float largest = largest_of(most);
    vf sum[VECTORS] = { 0 };
    for (int i = 0; i < padded; i += PAGE)
        for (int v = 0; v < VECTORS; v++) {
            vf e = exp_of(load(scores + i + v * LANES) - splat(largest));
            store(scores + i + v * LANES, e);
            sum[v] += e;
        }
    return sum_lanes(sum, VECTORS);
}

/* Rows `row` to `row + count` of one sequence. `space` is one thread's: a page, then a row of scores per query. */
static void attend_rows(const program *p, const operation *op, const batch *in, int row, int count, int head, float *space)
{
    const int size = p->head_size, per_head = p->num_heads / p->num_kv_heads, num_queries = count * per_head;
    const int sequence = in->sequences[row], last = in->positions[row + count - 1];
    int visible = op->window && in->positions[row] >= op->window ? in->positions[row] - op->window + 1 : 0;
    const int first = visible / PAGE * PAGE, padded = (last - first + PAGE) / PAGE * PAGE;
    /* Close together, for the sake of the address caches; not a power of two, for the sake of the others. */
    float *page = space, *scores = space + size * PAGE;
    const float *q[ATTEND_ROWS * 64];
    float *out[ATTEND_ROWS * 64], *weights[ATTEND_ROWS * 64];
    for (int k = 0; k < num_queries; k++) {
        int64_t r = row + k / per_head, column = (head * per_head + k % per_head) * size;
        q[k] = op->src.base + r * op->src.stride + column;
        out[k] = op->dst.base + r * op->dst.stride + column;
        weights[k] = scores + (int64_t)k * (padded + PAGE);
    }
    for (int start = first; start <= last; start += PAGE) {
        const float *keys = page_values(p, page_index(p, in, op->layer, 0, sequence, start / PAGE, head), page);
        for (int k = 0, n; k < num_queries; k += n) {
            float *at[QUERIES];
            n = at_once(num_queries - k);
            for (int i = 0; i < n; i++) at[i] = weights[k + i] + start - first;
            scores_of(n, keys, size, q + k, op->scale, at);
        }
    }
    float sums[ATTEND_ROWS * 64];
    for (int k = 0; k < num_queries; k++) {
        int position = in->positions[row + k / per_head];
        visible = op->window && position >= op->window ? position - op->window + 1 : 0;
        sums[k] = softmax_of(weights[k], first, visible, position, padded);
        memset(out[k], 0, (size_t)size * 4);
    }
    for (int start = first; start <= last; start += PAGE) {
        const float *values = page_values(p, page_index(p, in, op->layer, 1, sequence, start / PAGE, head), page);
        /* What lies after the last row was never written. */
        int tokens = last - start < PAGE - 1 ? last - start + 1 : PAGE;
        for (int k = 0, n; k < num_queries; k += n) {
            const float *at[QUERIES];
            n = at_once(num_queries - k);
            for (int i = 0; i < n; i++) at[i] = weights[k + i] + start - first;
            sums_of(n, values, size, tokens, at, out + k);
        }
    }
    for (int k = 0; k < num_queries; k++)
        for (int d = 0; d < size; d++) out[k][d] /= sums[k];
}

void attend_task(const program *p, const operation *op, const batch *in, int task, float *space)
{
    int head = task % p->num_kv_heads, run = task / p->num_kv_heads;
    int row = p->runs[run], count = p->runs[run + 1] - row;
    int width = p->num_heads / p->num_kv_heads * p->head_size;
    if (!in->has_runs) store_head(p, op, in, row, head);
    attend_rows(p, op, in, row, count, head, space);
    for (int r = row; op->quantizes && r < row + count; r++)
        quantize(&p->quantized, r, op->dst.base + r * op->dst.stride, head * width, width);
}

/* Cut the rows into runs of one sequence. */
int find_runs(const batch *in, int32_t *runs)
{
    int num_runs = 0;
    for (int row = 0; row < in->num_rows; row++)
        if (row == 0 || in->sequences[row] != in->sequences[row - 1] || row - runs[num_runs - 1] == ATTEND_ROWS)
            runs[num_runs++] = row;
    runs[num_runs] = in->num_rows;
    return num_runs;
}
