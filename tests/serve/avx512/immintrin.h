/* The AVX-512 and AMX intrinsics that our kernels use, in C, for machines that lack them: as the processor's manual defines
 * them, so that tests of the kernels say something about x86 wherever they run. Stands in for the compiler's own. */
#ifndef EMULATED_AVX512_H
#define EMULATED_AVX512_H

#include <stdint.h>
#include <string.h>

typedef float __m512 __attribute__((vector_size(64), aligned(4), may_alias));
typedef int64_t __m512i __attribute__((vector_size(64), aligned(8), may_alias));
typedef int64_t __m256i __attribute__((vector_size(32), aligned(8), may_alias));
typedef union { __m512i whole; int8_t s8[64]; uint8_t u8[64]; uint16_t u16[32]; int32_t s32[16]; } parts512;

#define EMULATED static inline __attribute__((always_inline))

EMULATED __m512 _mm512_fmadd_ps(__m512 a, __m512 b, __m512 c)
{
    for (int i = 0; i < 16; i++) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return c;
}

EMULATED __m256i _mm256_loadu_si256(const __m256i *p)
{
    __m256i out;
    memcpy(&out, p, sizeof out);
    return out;
}

EMULATED __m512 _mm512_cvtph_ps(__m256i a)
{
    _Float16 half[16];
    __m512 out;
    memcpy(half, &a, sizeof half);
    for (int i = 0; i < 16; i++) out[i] = half[i];
    return out;
}

EMULATED unsigned short _cvtss_sh(float x, int rounding)
{
    (void)rounding; /* to nearest */
    _Float16 half = (_Float16)x;
    unsigned short out;
    memcpy(&out, &half, sizeof out);
    return out;
}

EMULATED __m512i _mm512_loadu_si512(const void *p)
{
    __m512i out;
    memcpy(&out, p, sizeof out);
    return out;
}

EMULATED __m512i _mm512_setzero_si512(void) { return (__m512i){ 0 }; }
EMULATED __m512i _mm512_and_si512(__m512i a, __m512i b) { return a & b; }
EMULATED __m512i _mm512_xor_si512(__m512i a, __m512i b) { return a ^ b; }

EMULATED __m512i _mm512_set1_epi8(char x)
{
    parts512 out;
    for (int i = 0; i < 64; i++) out.s8[i] = (int8_t)x;
    return out.whole;
}

EMULATED __m512i _mm512_set1_epi32(int x)
{
    parts512 out;
    for (int i = 0; i < 16; i++) out.s32[i] = x;
    return out.whole;
}

EMULATED __m512i _mm512_srli_epi16(__m512i a, unsigned int count)
{
    parts512 out = { a };
    for (int i = 0; i < 32; i++) out.u16[i] = (uint16_t)(out.u16[i] >> count);
    return out.whole;
}

/* Four products of an unsigned byte of `a` and a signed one of `b` join each sum. */
EMULATED __m512i _mm512_dpbusd_epi32(__m512i sums, __m512i a, __m512i b)
{
    parts512 out = { sums }, x = { a }, y = { b };
    for (int i = 0; i < 64; i++) out.s32[i / 4] += x.u8[i] * y.s8[i];
    return out.whole;
}

EMULATED __m512 _mm512_cvtepi32_ps(__m512i a)
{
    parts512 in = { a };
    __m512 out;
    for (int i = 0; i < 16; i++) out[i] = (float)in.s32[i];
    return out;
}

EMULATED float _mm512_reduce_max_ps(__m512 a)
{
    float largest = a[0];
    for (int i = 1; i < 16; i++) largest = a[i] > largest ? a[i] : largest;
    return largest;
}

EMULATED void _mm512_storeu_si512(void *p, __m512i a) { memcpy(p, &a, sizeof a); }

/* Tiles, with the shapes that the thread has set; what does not fit them ends the process. */
typedef struct { uint8_t palette, start, zero[14]; uint16_t row_bytes[16]; uint8_t rows[16]; } tile_shapes;
static __thread tile_shapes emulated_shapes;
static __thread union { int8_t s8[16][64]; uint8_t u8[16][64]; int32_t s32[16][16]; } emulated_tiles[8];

EMULATED void _tile_loadconfig(const void *shapes)
{
    memcpy(&emulated_shapes, shapes, 64);
    if (emulated_shapes.palette != 1) __builtin_trap();
    memset(emulated_tiles, 0, sizeof emulated_tiles);
}

EMULATED void _tile_release(void) { memset(&emulated_shapes, 0, sizeof emulated_shapes); }

EMULATED void _tile_zero(int tile)
{
    if (!emulated_shapes.rows[tile]) __builtin_trap();
    memset(&emulated_tiles[tile], 0, sizeof emulated_tiles[tile]);
}

EMULATED void _tile_loadd(int tile, const void *base, int64_t stride)
{
    _tile_zero(tile);
    for (int r = 0; r < emulated_shapes.rows[tile]; r++)
        memcpy(emulated_tiles[tile].s8[r], (const char *)base + r * stride, emulated_shapes.row_bytes[tile]);
}

EMULATED void _tile_stored(int tile, void *base, int64_t stride)
{
    for (int r = 0; r < emulated_shapes.rows[tile]; r++)
        memcpy((char *)base + r * stride, emulated_tiles[tile].s8[r], emulated_shapes.row_bytes[tile]);
}

EMULATED void emulated_products(int to, int a, int b, int is_unsigned)
{
    const tile_shapes *s = &emulated_shapes;
    if (s->rows[to] != s->rows[a] || s->row_bytes[to] != s->row_bytes[b] || s->row_bytes[a] != 4 * s->rows[b])
        __builtin_trap();
    for (int m = 0; m < s->rows[to]; m++)
        for (int k = 0; k < s->rows[b]; k++)
            for (int n = 0; n < s->row_bytes[to]; n++) {
                int weight = is_unsigned ? emulated_tiles[b].u8[k][n] : emulated_tiles[b].s8[k][n];
                emulated_tiles[to].s32[m][n / 4] += emulated_tiles[a].s8[m][4 * k + n % 4] * weight;
            }
}

EMULATED void _tile_dpbssd(int to, int a, int b) { emulated_products(to, a, b, 0); }
EMULATED void _tile_dpbsud(int to, int a, int b) { emulated_products(to, a, b, 1); }

#endif
