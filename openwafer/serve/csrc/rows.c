/* What is done to a row by itself: embedding, norms, activations, rotary tables, rounding to 8 bits. */
#include "decoder.h"
#include <math.h>

static float half_value(const half_t *p) { half_t padded[LANES] = { *p }; return load_half(padded)[0]; }

static float scale_at(const uint8_t *record, int is_wide, int index)
{
    return is_wide ? ((const float *)record)[index] : half_value((const half_t *)record + index);
}

/* Row `token` of a packed matrix. */
static float matrix_value(const matrix *m, int64_t group, int lane, int64_t column)
{
    int64_t columns = m->num_columns, blocks = (columns + BLOCK - 1) / BLOCK;
    int64_t at = (group * columns + column) * GROUP + lane;
    if (m->format == FORMAT_FP32) return ((const float *)m->data)[at];
    if (m->format == FORMAT_FP16) return half_value((const half_t *)m->data + at);
    if (m->format == FORMAT_BF16) {
        union { uint32_t bits; float value; } w = { (uint32_t)((const half_t *)m->data)[at] << 16 };
        return w.value;
    }
    int scale_bytes = GROUP * (m->is_wide ? 4 : 2), k = (int)(column % BLOCK);
    if (m->format == FORMAT_Q8) {
        const uint8_t *record = (const uint8_t *)m->data + (group * blocks + column / BLOCK) * (scale_bytes + 512);
        int8_t q = ((const int8_t *)record + scale_bytes)[(k / 4) * 64 + lane * 4 + k % 4];
        return (float)q * scale_at(record, m->is_wide, lane);
    }
    const uint8_t *record = (const uint8_t *)m->data + (group * blocks + column / BLOCK) * (2 * scale_bytes + 256);
    uint8_t both = record[2 * scale_bytes + (k % 16 / 4) * 64 + lane * 4 + k % 4];
    float q = (float)(k < 16 ? both & 15 : both >> 4);
    return q * scale_at(record, m->is_wide, lane) + scale_at(record + scale_bytes, m->is_wide, lane);
}

void embed_row(const operation *op, const batch *in, int row)
{
    int64_t token = in->tokens[row];
    float *out = op->dst.base + row * op->dst.stride;
    for (int k = 0; k < op->dst.width; k++)
        out[k] = matrix_value(&op->weights, token / GROUP, (int)(token % GROUP), k) * op->scale;
}

/* Sums of 16 lanes, then lane by lane; what does not fill 16 comes last. */
static float sum_of(const float *x, int n, float centre, int squares)
{
    vf lanes[VECTORS] = { 0 };
    int whole = n / GROUP * GROUP;
    for (int k = 0; k < whole; k += GROUP)
        for (int v = 0; v < VECTORS; v++) {
            vf value = load(x + k + v * LANES) - splat(centre);
            if (squares) lanes[v] = FMA(value, value, lanes[v]);
            else lanes[v] += value;
        }
    float total = sum_lanes(lanes, VECTORS);
    for (int k = whole; k < n; k++) {
        float value = x[k] - centre;
        total += squares ? value * value : value;
    }
    return total;
}

void norm_row(const operation *op, int src_row, int row)
{
    int n = op->width;
    for (int start = 0; start < op->dst.width; start += n) {
        const float *x = op->src.base + src_row * op->src.stride + start;
        float *out = op->dst.base + row * op->dst.stride + start;
        float mean = op->flags ? sum_of(x, n, 0, 0) / (float)n : 0;
        float gain = 1.0f / sqrtf(sum_of(x, n, mean, 1) / (float)n + op->scale);
        for (int k = 0; k < n; k++) out[k] = (x[k] - mean) * gain * op->vector[k];
        if (op->bias)
            for (int k = 0; k < n; k++) out[k] += op->bias[k];
    }
}

INLINE vf sigmoid(vf x) { return splat(1.0f) / (splat(1.0f) + exp_of(-x)); }

INLINE vf activation(vf x, int kind)
{
    if (kind == ACT_SILU) return x * sigmoid(x);
    if (kind == ACT_RELU) return (vf)((vi)x & (x > splat(0.0f)));
    if (kind == ACT_GELU) {
        vf out;
        for (int i = 0; i < LANES; i++) out[i] = 0.5f * x[i] * (1.0f + erff(x[i] * 0.70710678f));
        return out;
    }
    /* 0.5 x (1 + tanh(u)) = x sigmoid(2u) */
    vf u = splat(0.79788456f) * FMA(splat(0.044715f) * x, x * x, x);
    return x * sigmoid(u + u);
}

void activate_row(const operation *op, int row)
{
    float *x = op->dst.base + row * op->dst.stride;
    const float *up = op->extra.base ? op->extra.base + row * op->extra.stride : 0;
    int n = op->dst.width, k = 0;
    for (; k + LANES <= n; k += LANES) {
        vf y = activation(load(x + k), op->flags);
        if (up) y = y * load(up + k);
        store(x + k, y);
    }
    if (k < n) {
        float padded[LANES] = { 0 };
        memcpy(padded, x + k, (size_t)(n - k) * 4);
        vf y = activation(load(padded), op->flags);
        for (int i = 0; k + i < n; i++) x[k + i] = up ? y[i] * up[k + i] : y[i];
    }
}

/* `count` columns from `first` (a multiple of BLOCK) on; a last block that is not full is filled up with zeros. */
void quantize(const rounded *out, int row, const float *x, int first, int count)
{
    for (int k = 0; k < count; k += BLOCK) {
        float padded[BLOCK] = { 0 };
        const float *block = x + first + k;
        if (count - k < BLOCK) {
            memcpy(padded, block, (size_t)(count - k) * 4);
            block = padded;
        }
        vf most = splat(0);
        for (int i = 0; i < BLOCK; i += LANES) most = larger((vf)((vi)load(block + i) & 0x7fffffff), most);
        float scale = largest_of(most) / 127.0f, inverse = scale > 0 ? 1.0f / scale : 0.0f;
        int64_t at = rounded_at(out, row, (first + k) / BLOCK);
        int8_t *q = out->values + at * BLOCK;
        int total = 0;
        for (int i = 0; i < BLOCK; i++) {
            /* adding 1.5 * 2**23 rounds to the nearest whole number, which is then in the low bits */
            union { float value; int32_t bits; } w = { block[i] * inverse + 12582912.0f };
            q[i] = (int8_t)(w.bits - 0x4b400000);
            total += w.bits - 0x4b400000;
        }
        out->scales[at] = scale;
        out->totals[at] = total;
        out->sums[at] = scale * (float)total;
    }
}

void rotary_row(const program *p, const operation *op, int position, int row)
{
    int half = p->head_size / 2;
    float *cosines = p->cosines + op->width * p->rotary_stride + row * half, *sines = cosines + p->rotary_stride / 2;
    for (int i = 0; i < half; i++) {
        float angle = (float)position * op->vector[i];
        cosines[i] = cosf(angle);
        sines[i] = sinf(angle);
    }
}
