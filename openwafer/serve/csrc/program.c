/* Runs a program on a batch with a few threads that stay.
 *
 * Every operation is cut into tasks that threads take as they come. An operation is over when its tasks are done, not
 * when all threads have come by: a thread that the system has put aside holds nobody up unless it holds a task. (With
 * a barrier per operation a decoding step on a busy machine took 15 times as long.) Counters carry the number of the
 * batch in their upper half, so a late thread sees that its batch is over and leaves. Who does a task does not change
 * its result. */
#define _GNU_SOURCE
#include "decoder.h"
#include <limits.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>

#define MOST_THREADS 256
#define SPINS 4000 /* some 10 us */

typedef struct {
    _Atomic uint64_t next, done; /* batch number << 32 | tasks taken, tasks finished */
} phase_state;

typedef struct {
    program what;
    batch in;
    int num_threads, num_workers, num_phases, is_closing, num_runs, first, stop; /* operations of this round */
    phase_state *phases;
    pthread_mutex_t lock;
    pthread_cond_t wake;
    _Atomic uint32_t round; /* number of the batch; written under the lock */
    pthread_t threads[MOST_THREADS];
} runner;

/* One thread's way through one batch. */
typedef struct {
    runner *r;
    uint32_t round;
    int thread;
} pass;

INLINE void relax(int spins)
{
    if (spins > SPINS) { sched_yield(); return; }
#if defined(__aarch64__)
    __asm__ volatile("yield");
#elif defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

/* The first of `count` tasks, or INT_MAX where none is left or the batch is over. */
static int take(const pass *t, int phase, int count, int total)
{
    _Atomic uint64_t *next = &t->r->phases[phase].next;
    uint64_t seen = atomic_load_explicit(next, memory_order_acquire);
    for (;;) {
        if (seen >> 32 != t->round || (uint32_t)seen >= (uint32_t)total) return INT_MAX;
        if (atomic_compare_exchange_weak_explicit(next, &seen, seen + (uint32_t)count, memory_order_acq_rel,
                                                  memory_order_acquire))
            return (int)(uint32_t)seen;
    }
}

static void finish(const pass *t, int phase, int count)
{
    atomic_fetch_add_explicit(&t->r->phases[phase].done, (uint64_t)count, memory_order_acq_rel);
}

/* Wait until all tasks of a phase are done; 0 if the batch is over. */
static int meet(const pass *t, int phase, int total)
{
    for (int spins = 0;; spins++) {
        uint64_t seen = atomic_load_explicit(&t->r->phases[phase].done, memory_order_acquire);
        if (seen >> 32 != t->round) return 0;
        if ((uint32_t)seen == (uint32_t)total) return 1;
        relax(spins);
    }
}

static void do_row(const program *p, const operation *op, const batch *in, int row)
{
    float *dst = op->dst.base + row * op->dst.stride;
    if (op->kind == OP_EMBED) embed_row(op, in, row);
    if (op->kind == OP_NORM) norm_row(op, op->gathers ? in->logit_rows[row] : row, row);
    if (op->kind == OP_ACTIVATE) activate_row(op, row);
    if (op->kind == OP_ADD_POSITION) {
        const float *src = op->vector + (int64_t)in->positions[row] * op->dst.width;
        for (int k = 0; k < op->dst.width; k++) dst[k] += src[k];
    }
    if (op->kind == OP_ADD) {
        const float *src = op->src.base + row * op->src.stride;
        for (int k = 0; k < op->dst.width; k++) dst[k] += src[k];
    }
    if (op->quantizes) quantize(&p->quantized, row, dst, 0, op->dst.width);
}

static int do_rows(const pass *t, const operation *op, int num_rows, int phase)
{
    int row;
    while ((row = take(t, phase, 1, num_rows)) != INT_MAX) {
        do_row(&t->r->what, op, &t->r->in, row);
        finish(t, phase, 1);
    }
    return meet(t, phase, num_rows);
}

static int do_linear(const pass *t, const operation *op, int num_rows, int phase)
{
    int groups = (op->weights.num_rows + GROUP - 1) / GROUP;
    /* Small pieces, because cores are seldom equally fast; not so small that taking them costs. */
    int piece = groups / (t->r->num_threads * 8) + 1, first;
    while ((first = take(t, phase, piece, groups)) != INT_MAX) {
        int count = groups - first < piece ? groups - first : piece;
        linear_groups(&t->r->what, op, num_rows, first, first + count);
        finish(t, phase, count);
    }
    return meet(t, phase, groups);
}

static int do_attend(const pass *t, const operation *op, int phase)
{
    const program *p = &t->r->what;
    const batch *in = &t->r->in;
    int task, num_rows = in->num_rows, tasks = t->r->num_runs * p->num_kv_heads;
    if (in->has_runs) {
        while ((task = take(t, phase + 1, 1, num_rows)) != INT_MAX) {
            store_row(p, op, in, task);
            finish(t, phase + 1, 1);
        }
        if (!meet(t, phase + 1, num_rows)) return 0;
    }
    while ((task = take(t, phase, 1, tasks)) != INT_MAX) {
        attend_task(p, op, in, task, p->scores + t->thread * p->thread_stride);
        finish(t, phase, 1);
    }
    return meet(t, phase, tasks);
}

static int do_operation(const pass *t, const operation *op, int num_rows, int phase)
{
    if (op->kind == OP_LINEAR) return do_linear(t, op, num_rows, phase);
    if (op->kind == OP_ATTEND) return do_attend(t, op, phase);
    return do_rows(t, op, num_rows, phase);
}

static void run_batch(runner *r, uint32_t round, int thread)
{
    pass t = { r, round, thread };
    const program *p = &r->what;
    int num_rows = r->in.num_rows, num_logits = r->in.num_logits, first = r->first, stop = r->stop;
    for (int k = first; k < stop && k < p->num_body; k++)
        if (!do_operation(&t, &p->operations[k], num_rows, 2 * k)) return;
    for (int k = first < p->num_body ? p->num_body : first; k < stop && num_logits; k++) {
        operation op = p->operations[k];
        if (op.kind == OP_LINEAR) op.dst.base = r->in.logits + op.layer;
        if (!do_operation(&t, &op, num_logits, 2 * k)) return;
    }
}

static void *worker(void *argument)
{
    runner *r = ((void **)argument)[0];
    int thread = (int)(intptr_t)((void **)argument)[1];
    uint32_t seen = 0;
    free(argument);
    for (;;) {
        for (int spins = 0; spins < SPINS && atomic_load(&r->round) == seen; spins++) relax(spins);
        pthread_mutex_lock(&r->lock);
        while (atomic_load(&r->round) == seen && !r->is_closing) pthread_cond_wait(&r->wake, &r->lock);
        int is_closing = r->is_closing;
        seen = atomic_load(&r->round);
        pthread_mutex_unlock(&r->lock);
        if (is_closing) return 0;
        run_batch(r, seen, thread);
    }
}

void decoder_close(runner *r)
{
    pthread_mutex_lock(&r->lock);
    r->is_closing = 1;
    pthread_cond_broadcast(&r->wake);
    pthread_mutex_unlock(&r->lock);
    for (int k = 0; k < r->num_workers; k++) pthread_join(r->threads[k], 0);
    free(r->phases);
    free(r);
}

/* Starts the threads. The program's arrays stay the caller's. Null without memory. */
runner *decoder_open(const program *what, int num_threads)
{
    runner *r = calloc(1, sizeof *r);
    if (!r) return 0;
    r->what = *what;
    r->num_phases = 2 * (what->num_body + what->num_head);
    r->phases = calloc((size_t)r->num_phases, sizeof *r->phases);
    pthread_mutex_init(&r->lock, 0);
    pthread_cond_init(&r->wake, 0);
    if (num_threads > MOST_THREADS) num_threads = MOST_THREADS;
    for (int k = 1; r->phases && k < num_threads; k++) {
        void **argument = malloc(2 * sizeof *argument);
        if (!argument) break;
        argument[0] = r;
        argument[1] = (void *)(intptr_t)k;
        if (pthread_create(&r->threads[r->num_workers], 0, worker, argument)) { free(argument); break; }
        r->num_workers++;
    }
    r->num_threads = r->num_workers + 1;
    if (!r->phases) { decoder_close(r); return 0; }
    return r;
}

/* Operations `first` to `stop` of a step, all of which come one after the other with the same batch. Rows' keys and
 * values go into the cache, logits of the wanted rows to in->logits. */
void decoder_run(runner *r, const batch *in, int first, int stop)
{
    uint32_t round = atomic_load(&r->round) + 1;
    for (int k = 0; k < r->num_phases; k++) {
        atomic_store_explicit(&r->phases[k].next, (uint64_t)round << 32, memory_order_relaxed);
        atomic_store_explicit(&r->phases[k].done, (uint64_t)round << 32, memory_order_relaxed);
    }
    r->in = *in;
    r->first = first;
    r->stop = stop;
    r->num_runs = find_runs(in, r->what.runs);
    int tables = 0;
    for (int k = 0; !first && k < r->what.num_body && tables < r->what.num_rotary_tables; k++) {
        const operation *op = &r->what.operations[k];
        if (op->kind != OP_ATTEND || op->width != tables) continue;
        for (int row = 0; row < in->num_rows; row++) rotary_row(&r->what, op, in->positions[row], row);
        tables++;
    }
    pthread_mutex_lock(&r->lock);
    atomic_store(&r->round, round);
    pthread_cond_broadcast(&r->wake);
    pthread_mutex_unlock(&r->lock);
    run_batch(r, round, 0);
}
