/* A decoder's operations on rows of fp32 numbers: what Python hands over, and the vectors that the kernels use.
 *
 * Every sum is taken in one order that depends on the shapes of the model alone, never on how many rows there are or
 * which thread works: a row's result is the same bits alone and in any batch. Fused multiply-adds are written out
 * (FMA), because a compiler may fuse in one copy of a loop and not in another. */
#ifndef DECODER_H
#define DECODER_H

#include <stdint.h>
#include <string.h>

#if defined(__ARM_NEON)
#include <arm_neon.h>
#elif defined(__AVX2__)
#include <immintrin.h>
#endif

#define GROUP 16        /* outputs side by side in a packed matrix */
#define BLOCK 32        /* inputs that share a scale */
#define TILE_ROWS 8     /* rows that a kernel takes at once at most */
#define ATTEND_ROWS 8   /* rows of a sequence that attention takes together at most */
#define PAGE 16         /* tokens in a block of the key/value cache */
#define SUM_LENGTH 256  /* fp32 products that are added before they join the total: shorter chains round less */

#define INLINE static inline __attribute__((always_inline))

/* One machine vector of floats; a GROUP is VECTORS of them. */
#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX2__)
#define LANES 8
#else
#define LANES 4
#endif
#define VECTORS (GROUP / LANES)
typedef float vf __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef int32_t vi __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef uint16_t half_t;

INLINE vf load(const float *p) { return *(const vf *)p; }
INLINE void store(float *p, vf v) { *(vf *)p = v; }
INLINE vf splat(float x) { return x - (vf){0}; }

INLINE vf FMA(vf a, vf b, vf c)
{
#if defined(__AVX512F__)
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__ARM_NEON)
    return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

/* LANES fp16 numbers */
INLINE vf load_half(const half_t *p)
{
#if defined(__AVX512F__)
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#elif defined(__AVX2__) && defined(__F16C__)
    return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
#elif defined(__ARM_NEON)
    return (vf)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
#else
    vf out;
    for (int i = 0; i < LANES; i++) {
        /* Shifted into place the exponent is 112 too small, also that of subnormal numbers. */
        union { uint32_t bits; float value; } w = { (uint32_t)(p[i] & 0x7fffu) << 13 };
        w.value *= 0x1p112f;
        if ((p[i] & 0x7c00u) == 0x7c00u) w.bits |= 0x7f800000u;
        w.bits |= (uint32_t)(p[i] & 0x8000u) << 16;
        out[i] = w.value;
    }
    return out;
#endif
}

INLINE vf load_bf16(const half_t *p)
{
    vf out;
    union { uint32_t bits; float value; } w;
    for (int i = 0; i < LANES; i++) { w.bits = (uint32_t)p[i] << 16; out[i] = w.value; }
    return out;
}

/* Rounded to nearest, ties to even, as every fp16 hardware does. */
INLINE half_t to_half(float x)
{
#if defined(__ARM_NEON)
    return vget_lane_u16(vreinterpret_u16_f16(vcvt_f16_f32(vdupq_n_f32(x))), 0);
#elif defined(__F16C__)
    return (half_t)_cvtss_sh(x, 0);
#else
    union { float value; uint32_t bits; } w = { x };
    uint32_t sign = (w.bits >> 16) & 0x8000u;
    w.bits &= 0x7fffffffu;
    if (w.bits > 0x7f800000u) return (half_t)(sign | 0x7e00u);
    if (w.bits >= 0x477ff000u) return (half_t)(sign | 0x7c00u);
    if (w.bits < 0x38800000u) {
        /* Adding 0.5 puts the last bit of a subnormal fp16 at the last bit of the sum, rounded by the hardware. */
        w.value += 0.5f;
        return (half_t)(sign | (w.bits - 0x3f000000u));
    }
    return (half_t)(sign | ((w.bits - 0x38000000u + 0xfffu + ((w.bits >> 13) & 1u)) >> 13));
#endif
}

/* Lane by lane in order. */
INLINE float sum_lanes(const vf *v, int count)
{
    float total = 0;
    for (int k = 0; k < count; k++)
        for (int i = 0; i < LANES; i++) total += v[k][i];
    return total;
}

/* Lane by lane; `than` where x is no number. */
INLINE vf larger(vf x, vf than)
{
    vi is_larger = x > than;
    return (vf)(((vi)x & is_larger) | ((vi)than & ~is_larger));
}

INLINE float largest_of(vf x)
{
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)x);
#elif defined(__ARM_NEON)
    return vmaxvq_f32((float32x4_t)x);
#else
    float largest = x[0];
    for (int i = 1; i < LANES; i++) largest = x[i] > largest ? x[i] : largest;
    return largest;
#endif
}

/* e**x to about 1e-7 relative; 0 below -87. */
INLINE vf exp_of(vf x)
{
    vi below = x < splat(-87.0f);
    x = (vf)((vi)x & ~below);
    vf shifted = FMA(x, splat(1.44269504f), splat(12582912.0f)); /* 1.5 * 2**23: rounds to a whole number */
    vf n = shifted - splat(12582912.0f);
    vf r = FMA(n, splat(-0.693359375f), x);
    r = FMA(n, splat(2.12194440e-4f), r);
    vf p = splat(1.9875691500e-4f);
    p = FMA(p, r, splat(1.3981999507e-3f));
    p = FMA(p, r, splat(8.3334519073e-3f));
    p = FMA(p, r, splat(4.1665795894e-2f));
    p = FMA(p, r, splat(1.6666665459e-1f));
    p = FMA(p, r, splat(5.0000001201e-1f));
    p = FMA(p, r * r, r) + splat(1.0f);
    vi bits = (vi)p + (((vi)shifted - (vi)splat(12582912.0f)) << 23);
    return (vf)(bits & ~below);
}

enum { FORMAT_FP32, FORMAT_BF16, FORMAT_FP16, FORMAT_Q8, FORMAT_Q4 };

typedef struct {
    const void *data;
    int32_t format, is_wide, num_rows, num_columns;
} matrix;

/* Columns of a buffer: `base` is the first row's, `stride` the floats from row to row. */
typedef struct {
    float *base;
    int64_t stride;
    int32_t width;
} span;

enum { OP_EMBED, OP_ADD_POSITION, OP_NORM, OP_LINEAR, OP_ATTEND, OP_ACTIVATE, OP_ADD, OP_QUANTIZE };
enum { ACT_GELU, ACT_GELU_TANH, ACT_SILU, ACT_RELU };

typedef struct {
    int32_t kind;
    int32_t flags;          /* norm: centred; linear: adds; activate: which */
    int32_t quantizes;      /* the result of each row is also rounded to 8 bits for the packed matrix that follows */
    int32_t gathers;        /* src rows are those whose logits are wanted */
    span dst, src, extra;   /* extra: `up` of activate; attend: src is q, then k and v follow in the same buffer */
    matrix weights;         /* linear; embed */
    const float *vector;    /* norm weight; positions; linear bias; attend: frequencies, or null */
    const float *bias;      /* of norm */
    float scale;            /* embed, attend; norm: eps */
    int32_t width;          /* norm: columns of one norm; attend: rotary table */
    int32_t layer, window;  /* attend; window 0: everything. linear of the head: layer is the first output's column */
} operation;

typedef struct {
    int32_t num_rows, num_logits, table_width, has_runs; /* has_runs: some sequence has several rows */
    const int32_t *tokens, *positions, *sequences, *tables, *logit_rows;
    float *logits;
} batch;

/* Activations in 8 bits, in tiles of TILE_ROWS rows, [tile][block][row][32]; per block and row the scale, the total of
 * the values, and scale * total, [tile][block][row]. A kernel then reads what it needs from one place. */
typedef struct {
    int8_t *values;
    float *scales, *sums;
    int32_t *totals;
    int64_t num_blocks; /* of a row */
} rounded;

INLINE int64_t rounded_at(const rounded *to, int64_t row, int64_t block)
{
    return (row / TILE_ROWS * to->num_blocks + block) * TILE_ROWS + row % TILE_ROWS;
}

typedef struct {
    const operation *operations;
    int32_t num_body, num_head;
    int32_t num_heads, num_kv_heads, head_size, num_rotary_tables, cache_is_half;
    int64_t num_blocks;
    void *cache;              /* [layer][k, v][block][kv head], keys as [head_size][PAGE], values as [PAGE][head_size] */
    float *cosines;           /* [rotary table][row][head_size / 2], then the sines */
    int64_t rotary_stride;    /* floats from table to table */
    float *scores;            /* `thread_stride` floats per thread: a page, then the scores of each query of a run */
    int64_t thread_stride;
    int32_t *runs;            /* first rows of the runs that attention takes together, and the end; filled per batch */
    rounded quantized;
} program;

/* rows.c */
void embed_row(const operation *op, const batch *in, int row);
void norm_row(const operation *op, int src_row, int row);
void activate_row(const operation *op, int row);
void quantize(const rounded *out, int row, const float *x, int first, int count);
void rotary_row(const program *p, const operation *op, int position, int row);

/* linear.c: outputs of groups `first` to `last` for all rows */
void linear_groups(const program *p, const operation *op, int num_rows, int first, int last);

/* attention.c: a task is a key/value head of a run of rows */
int find_runs(const batch *in, int32_t *runs);
void store_row(const program *p, const operation *op, const batch *in, int row);
void attend_task(const program *p, const operation *op, const batch *in, int task, float *space);

#endif
