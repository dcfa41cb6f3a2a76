/* AdamW on weights kept as a bf16 wire copy plus a 16-bit remainder, one pass over memory.
 *
 * master bits = (wire << 16) + remainder (signed); the new master is split again with wire rounded half up.
 * Every operation is rounded on its own (no fused multiply-add), in the order of adamw.py's reference.
 * The new state goes to `to`, which may be the place it came from: a step that may be taken back writes elsewhere.
 *
 * Threads are started per call and take pieces as they go: the call works beside others that feed a GPU, where
 * a pool that spins or a fixed share of the work costs more than starting threads does (0.2 ms). */
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#ifdef __SSE2__
#include <immintrin.h>
#endif

#define PIECE 65536
#define BLOCK 1024 /* elements computed in the first cache before they are written elsewhere */
#define MOST_THREADS 256

typedef union { uint32_t bits; float value; } word;

typedef struct {
    uint16_t *wire;
    int16_t *remainder;
    float *m, *v;
} state;

typedef struct {
    state from, to;
    const void *gradient;
    int64_t n, first_piece;
    float keep;
} weight;

typedef struct {
    const weight *weights;
    int num_weights, gradient_is_bf16;
    int64_t num_pieces;
    float divisor, inverse, factor, beta1, beta2, inverse_root, eps, rate;
    atomic_llong next;
    atomic_int is_bad;
} work;

static inline float from_bf16(uint16_t half) { word w = { (uint32_t)half << 16 }; return w.value; }

/* The same index is read and written, never another: the loop has no dependency even where `to` is `from`. */
#define LOOP(GRADIENT)                                                                   \
    _Pragma("GCC ivdep")                                                                 \
    for (int64_t i = 0; i < n; i++) {                                                    \
        word w;                                                                          \
        w.bits = ((uint32_t)wire[i] << 16) + (uint32_t)(int32_t)remainder[i];            \
        float g = (GRADIENT) * factor;                                                   \
        float kept = w.value * keep;                                                     \
        float m1 = m[i] * beta1 + g * (1.0f - beta1);                                    \
        float v1 = v[i] * beta2 + g * g * (1.0f - beta2);                                \
        new_m[i] = m1;                                                                   \
        new_v[i] = v1;                                                                   \
        w.value = kept - m1 / (sqrtf(v1) * inverse_root + eps) * rate;                   \
        bad |= (w.bits & 0x7f800000u) == 0x7f800000u;                                    \
        uint16_t high = (uint16_t)((w.bits + 0x8000u) >> 16);                            \
        new_wire[i] = high;                                                              \
        new_remainder[i] = (int16_t)(uint16_t)(w.bits - ((uint32_t)high << 16));         \
    }

static int update(const work *job, const weight *one, int64_t start, int64_t n, state to)
{
    const uint16_t *wire = one->from.wire + start;
    const int16_t *remainder = one->from.remainder + start;
    const float *m = one->from.m + start, *v = one->from.v + start;
    uint16_t *new_wire = to.wire;
    int16_t *new_remainder = to.remainder;
    float *new_m = to.m, *new_v = to.v;
    const float divisor = job->divisor, inverse = job->inverse, factor = job->factor, keep = one->keep;
    const float beta1 = job->beta1, beta2 = job->beta2, inverse_root = job->inverse_root, eps = job->eps;
    const float rate = job->rate;
    int bad = 0;
    if (job->gradient_is_bf16) {
        const uint16_t *gradient = (const uint16_t *)one->gradient + start;
        if (inverse != 0) LOOP(from_bf16(gradient[i]) * inverse)
        else LOOP(from_bf16(gradient[i]) / divisor)
    } else {
        const float *gradient = (const float *)one->gradient + start;
        if (inverse != 0) LOOP(gradient[i] * inverse)
        else LOOP(gradient[i] / divisor)
    }
    return bad;
}

/* To memory that will not be read soon: a plain store would read it first. */
static void stream(void *to, const void *from, int64_t num_bytes)
{
    int64_t done = 0;
#ifdef __SSE2__
    if ((uintptr_t)to % 16 == 0 && (uintptr_t)from % 16 == 0)
        for (; done + 64 <= num_bytes; done += 64)
            for (int64_t k = done; k < done + 64; k += 16)
                _mm_stream_si128((__m128i *)((char *)to + k), _mm_load_si128((const __m128i *)((const char *)from + k)));
#endif
    memcpy((char *)to + done, (const char *)from + done, (size_t)(num_bytes - done));
}

/* Elsewhere: block by block through the first cache, so that whole lines are streamed out one array at a time. With
 * plain stores it takes 40 % longer than in place (bench/adamw.py prints both). */
static int update_elsewhere(const work *job, const weight *one, int64_t start, int64_t n)
{
    uint16_t wire[BLOCK] __attribute__((aligned(64)));
    int16_t remainder[BLOCK] __attribute__((aligned(64)));
    float m[BLOCK] __attribute__((aligned(64))), v[BLOCK] __attribute__((aligned(64)));
    const state block = { wire, remainder, m, v };
    int bad = 0;
    for (int64_t at = start; at < start + n; at += BLOCK) {
        int64_t count = start + n - at < BLOCK ? start + n - at : BLOCK;
        bad |= update(job, one, at, count, block);
        stream(one->to.wire + at, wire, 2 * count);
        stream(one->to.remainder + at, remainder, 2 * count);
        stream(one->to.m + at, m, 4 * count);
        stream(one->to.v + at, v, 4 * count);
    }
#ifdef __SSE2__
    _mm_sfence();
#endif
    return bad;
}

static int piece(const work *job, const weight *one, int64_t start, int64_t n)
{
    if (one->to.wire != one->from.wire) return update_elsewhere(job, one, start, n);
    const state to = { one->to.wire + start, one->to.remainder + start, one->to.m + start, one->to.v + start };
    return update(job, one, start, n, to);
}

/* 1 / divisor if multiplying by it is the same as dividing (a power of two), else 0. Division is the slowest
 * operation of the loop, and the number of tokens in a batch is mostly a power of two. */
static float exact_inverse(float divisor)
{
    int exponent;
    return frexpf(divisor, &exponent) == 0.5f && exponent > -100 && exponent < 100 ? 1.0f / divisor : 0.0f;
}

static void *worker(void *argument)
{
    work *job = argument;
    int at = 0;
    for (;;) {
        int64_t index = atomic_fetch_add(&job->next, 1);
        if (index >= job->num_pieces) return 0;
        while (at + 1 < job->num_weights && job->weights[at + 1].first_piece <= index) at++;
        const weight *one = &job->weights[at];
        int64_t start = (index - one->first_piece) * PIECE, left = one->n - start;
        if (piece(job, one, start, left < PIECE ? left : PIECE)) atomic_store(&job->is_bad, 1);
    }
}

/* Updates several weights in one go; fills in `first_piece`. Returns 1 if a new master is not finite, else 0. */
int adamw(weight *weights, int num_weights, float divisor, float factor, float beta1, float beta2,
          float inverse_root, float eps, float rate, int gradient_is_bf16, int threads)
{
    int64_t pieces = 0;
    for (int k = 0; k < num_weights; k++) {
        weights[k].first_piece = pieces;
        pieces += (weights[k].n + PIECE - 1) / PIECE;
    }
    work job = { weights, num_weights, gradient_is_bf16, pieces, divisor, exact_inverse(divisor), factor,
                 beta1, beta2, inverse_root, eps, rate, 0, 0 };
    if (threads > MOST_THREADS) threads = MOST_THREADS;
    if (threads > pieces) threads = (int)pieces;
    pthread_t started[MOST_THREADS];
    int count = 0;
    while (count < threads - 1 && pthread_create(&started[count], 0, worker, &job) == 0) count++;
    worker(&job);
    for (int k = 0; k < count; k++) pthread_join(started[k], 0);
    return job.is_bad;
}
