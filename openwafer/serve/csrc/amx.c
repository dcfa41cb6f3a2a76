/* Products of many rows with packed weights on the tile unit of x86 processors: the sums of a block of 32 inputs are
 * whole numbers, so they are those of `dots` in linear.c, and they are scaled and added in the same order.
 *
 * A tile has 8 rows, as the rounded activations have, and 16 outputs. Two of them share their weights. */
#define _GNU_SOURCE
#include "linear.h"

#if HAS_AMX
#include <pthread.h>
#if defined(__x86_64__)
#include <setjmp.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#define PAIR (2 * TILE_ROWS)
#define FAR_ROWS 64 /* that share unpacked weights; their sums wait in memory */
#define SPAN 64     /* blocks that are unpacked at once: 32 KiB */

/* Tiles 0 and 1: sums; 2 and 3: activations; 4: weights. */
static void begin_tiles(void)
{
    static const struct { uint8_t palette, start, zero[14]; uint16_t row_bytes[16]; uint8_t rows[16]; } shapes = {
        1, 0, { 0 }, { 64, 64, BLOCK, BLOCK, 64 }, { TILE_ROWS, TILE_ROWS, TILE_ROWS, TILE_ROWS, BLOCK / 4 }
    };
    _tile_loadconfig(&shapes);
}

static int is_usable;
#if defined(__x86_64__)
static sigjmp_buf before_trial;
static void leave_trial(int number) { (void)number, siglongjmp(before_trial, 1); }

/* The kernel has to agree, and there are virtual machines that show the instructions and cannot run them. */
static void try_tiles(void)
{
    const long request = 0x1023, tile_data = 18; /* ARCH_REQ_XCOMP_PERM */
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    if ((low & 0x60000) != 0x60000 || syscall(SYS_arch_prctl, request, tile_data)) return;
    struct sigaction trial = { .sa_handler = leave_trial }, before;
    if (sigaction(SIGILL, &trial, &before)) return;
    if (!sigsetjmp(before_trial, 1)) {
        begin_tiles();
        _tile_zero(0);
        _tile_release();
        is_usable = 1;
    }
    sigaction(SIGILL, &before, 0);
}
#else
static void try_tiles(void) { is_usable = 1; }
#endif

int amx_works(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, try_tiles);
    return is_usable;
}

/* Products of a block with 16 rows. */
INLINE void multiply(const int is_q4, const int8_t *x, int64_t next_tile, const uint8_t *quants, int32_t *out)
{
    _tile_loadd(4, quants, 64);
    _tile_loadd(2, x, BLOCK);
    _tile_loadd(3, x + next_tile, BLOCK);
    _tile_zero(0);
    _tile_zero(1);
    if (is_q4) {
        _tile_dpbsud(0, 2, 4);
        _tile_dpbsud(1, 3, 4);
    } else {
        _tile_dpbssd(0, 2, 4);
        _tile_dpbssd(1, 3, 4);
    }
    _tile_stored(0, out, 64);
    _tile_stored(1, out + TILE_ROWS * GROUP, 64);
}

/* Adds `count` blocks from block `first` on to the sums of 16 rows. A block is multiplied while the one before it is
 * scaled: what a tile has stored can be loaded only a while later. Meanwhile what lies `ahead` bytes further is fetched:
 * a group is unpacked at once, and memory would rest while it is multiplied. */
INLINE void add_blocks(const int is_q4, const int is_wide, const uint8_t *data, const uint8_t *quants, int64_t quants_step,
                       const rounded *in, int row, int64_t first, int64_t count, int64_t ahead, float *sums)
{
    const int head = GROUP * (is_wide ? 4 : 2), record = is_q4 ? 2 * head + 256 : head + 512;
    const int64_t at = rounded_at(in, row, first), next_tile = in->num_blocks * TILE_ROWS;
    int32_t products[2][PAIR * GROUP] __attribute__((aligned(64)));
    vf total[PAIR];
#pragma GCC unroll 16
    for (int r = 0; r < PAIR; r++) total[r] = load(sums + r * GROUP);
    const int8_t *x = in->values + at * BLOCK;
    multiply(is_q4, x, next_tile * BLOCK, quants, products[0]);
    for (int64_t b = 0; b < count; b++) {
        if (b + 1 < count)
            multiply(is_q4, x + (b + 1) * TILE_ROWS * BLOCK, next_tile * BLOCK, quants + (b + 1) * quants_step,
                     products[(b + 1) & 1]);
        for (int line = 0; ahead && line < record; line += 64) __builtin_prefetch(data + b * record + ahead + line, 0, 2);
        const vf scale = load_scales(data + b * record, is_wide, 0);
        const vf offset = is_q4 ? load_scales(data + b * record + head, is_wide, 0) : splat(0);
#pragma GCC unroll 16
        for (int r = 0; r < PAIR; r++) {
            const int64_t of = at + b * TILE_ROWS + (r < TILE_ROWS ? r : next_tile + r - TILE_ROWS);
            const vf product = (vf)_mm512_cvtepi32_ps(_mm512_loadu_si512(products[b & 1] + r * GROUP));
            total[r] = FMA(product, scale * splat(in->scales[of]), total[r]);
            if (is_q4) total[r] = FMA(offset, splat(in->sums[of]), total[r]);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < PAIR; r++) store(sums + r * GROUP, total[r]);
}

/* 4-bit weights of `count` blocks as bytes. */
static void unpack(const uint8_t *data, int record, int64_t count, uint8_t *out)
{
    const __m512i low = _mm512_set1_epi8(15);
    for (int64_t b = 0; b < count; b++)
        for (int j = 0; j < 4; j++) {
            const __m512i bytes = _mm512_loadu_si512(data + b * record + j * 64);
            _mm512_storeu_si512(out + b * 512 + j * 64, _mm512_and_si512(bytes, low));
            _mm512_storeu_si512(out + b * 512 + 256 + j * 64, _mm512_and_si512(_mm512_srli_epi16(bytes, 4), low));
        }
    __asm__ volatile("" ::: "memory"); /* compilers do not know that tiles are loaded from there */
}

INLINE void far_rows(const int is_q4, const int is_wide, const program *p, const operation *op, int row, int num_rows,
                     int64_t group, float *sums)
{
    const int head = GROUP * (is_wide ? 4 : 2), record = is_q4 ? 2 * head + 256 : head + 512;
    const int64_t blocks = ((int64_t)op->weights.num_columns + BLOCK - 1) / BLOCK;
    uint8_t unpacked[is_q4 ? SPAN * 512 : 1] __attribute__((aligned(64)));
    for (int64_t first = 0; first < blocks; first += SPAN) {
        const int64_t count = blocks - first < SPAN ? blocks - first : SPAN;
        const uint8_t *data = (const uint8_t *)op->weights.data + (group * blocks + first) * record;
        if (is_q4) unpack(data + 2 * head, record, count, unpacked);
        for (int r = 0; r < num_rows; r += PAIR)
            add_blocks(is_q4, is_wide, data, is_q4 ? unpacked : data + head, is_q4 ? 512 : record, &p->quantized, row + r,
                       first, count, r ? 0 : blocks * record, sums + r * GROUP);
    }
}

void amx_groups(const program *p, const operation *op, int num_rows, int first, int last)
{
    const matrix *m = &op->weights;
    float sums[FAR_ROWS * GROUP] __attribute__((aligned(64)));
    begin_tiles();
    for (int row = 0; row < num_rows; row += FAR_ROWS)
        for (int64_t group = first; group < last; group++) {
            const int rows = num_rows - row < FAR_ROWS ? num_rows - row : FAR_ROWS;
            memset(sums, 0, sizeof sums);
            if (m->format == FORMAT_Q4 && !m->is_wide) far_rows(1, 0, p, op, row, rows, group, sums);
            else if (m->format == FORMAT_Q4) far_rows(1, 1, p, op, row, rows, group, sums);
            else if (!m->is_wide) far_rows(0, 0, p, op, row, rows, group, sums);
            else far_rows(0, 1, p, op, row, rows, group, sums);
            const int64_t left = m->num_rows - group * GROUP;
            for (int r = 0; r < rows; r++)
                finish(op, row + r, group * GROUP, left < GROUP ? (int)left : GROUP, sums + r * GROUP);
        }
    _tile_release();
}
#endif
