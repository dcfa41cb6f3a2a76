/* The AVX-512 intrinsics that our kernels use, in C, for machines that lack them: as the processor's manual defines
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

#endif
