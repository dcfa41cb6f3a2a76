/* Sums of squares of blocks of a gradient; squares.py has the definition, with the same bits.
 *
 * The adds of one level do not depend on one another, so the compiler may use vectors and the result is still that of
 * one add after another, here and on a GPU. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>

#define BLOCK 16384
#define HALF (BLOCK / 2)
#define ROW 2048
#define BLOCKS_AT_A_TIME 16
#define MOST_THREADS 256

typedef struct {
    const void *gradient;
    int64_t n, blocks;
    float *sums;
    int is_bf16;
    _Atomic int64_t next;
} job;

static inline float widened(uint16_t bits) {
    union { uint32_t bits; float value; } word = { (uint32_t)bits << 16 };
    return word.value;
}

static inline __attribute__((always_inline)) float element(const void *x, int64_t i, int is_bf16) {
    return is_bf16 ? widened(((const uint16_t *)x)[i]) : ((const float *)x)[i];
}

static inline void add_pairs(float *restrict to, const float *restrict from, int64_t n) {
    for (int64_t i = 0; i < n; i++) to[i] = from[2 * i] + from[2 * i + 1];
}

/* Neighbours are added until one number is left; `n` is a power of two, `u` has room for half of it. */
static float paired(float *t, float *u, int64_t n) {
    while (n > 1) {
        n /= 2;
        add_pairs(u, t, n);
        float *swap = t;
        t = u;
        u = swap;
    }
    return t[0];
}

/* What is missing up to the whole block would add zeros: it is left out, as far as powers of two allow. */
static inline __attribute__((always_inline)) float sum(const void *x, int64_t n, int is_bf16) {
    float t[HALF], u[ROW / 2];
    int64_t size = 1;
    while (size < n) size *= 2;
    if (size <= ROW) {
        for (int64_t i = 0; i < size; i++) {
            float value = i < n ? element(x, i, is_bf16) : 0;
            t[i] = value * value;
        }
        return paired(t, u, size);
    }
    int64_t half = size / 2;
    for (int64_t i = 0; i < n - half; i++) {
        float low = element(x, i, is_bf16), high = element(x, i + half, is_bf16);
        t[i] = low * low + high * high;
    }
    for (int64_t i = n - half; i < half; i++) {
        float low = element(x, i, is_bf16);
        t[i] = low * low;
    }
    for (half /= 2; half >= ROW; half /= 2)
        for (int64_t i = 0; i < half; i++) t[i] += t[i + half];
    return paired(t, u, ROW);
}

static float block_sum(const job *j, int64_t block) {
    int64_t first = block * BLOCK, n = j->n - first < BLOCK ? j->n - first : BLOCK;
    const char *x = (const char *)j->gradient + first * (j->is_bf16 ? 2 : 4);
    return j->is_bf16 ? sum(x, n, 1) : sum(x, n, 0);
}

static void *worker(void *argument) {
    job *j = argument;
    for (;;) {
        int64_t first = atomic_fetch_add(&j->next, BLOCKS_AT_A_TIME);
        if (first >= j->blocks) return 0;
        int64_t end = first + BLOCKS_AT_A_TIME < j->blocks ? first + BLOCKS_AT_A_TIME : j->blocks;
        for (int64_t block = first; block < end; block++) j->sums[block] = block_sum(j, block);
    }
}

void square_sums(const void *gradient, int64_t n, float *sums, int is_bf16, int threads) {
    job j = { gradient, n, (n + BLOCK - 1) / BLOCK, sums, is_bf16, 0 };
    int64_t parts = (j.blocks + BLOCKS_AT_A_TIME - 1) / BLOCKS_AT_A_TIME;
    if (threads > MOST_THREADS) threads = MOST_THREADS;
    if (threads > parts) threads = (int)parts;
    pthread_t started[MOST_THREADS];
    int count = 0;
    while (count < threads - 1 && pthread_create(&started[count], 0, worker, &j) == 0) count++;
    worker(&j);
    for (int k = 0; k < count; k++) pthread_join(started[k], 0);
}
