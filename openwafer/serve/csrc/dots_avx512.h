/* Products of blocks with AVX-512 VNNI; dots_portable.h says what they are. */
#ifndef DOTS_AVX512_H
#define DOTS_AVX512_H

#include "decoder.h"

#define STEP 16
typedef struct { __m512i v[8]; } weights;

INLINE weights load_weights(const int is_q4, const uint8_t *data, int lane)
{
    (void)lane;
    weights w;
    const __m512i low = _mm512_set1_epi8(15), top = _mm512_set1_epi8((char)0x80);
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
        __m512i bytes = _mm512_loadu_si512((const void *)(data + j * 64));
        if (is_q4) {
            w.v[j] = _mm512_and_si512(bytes, low);
            w.v[j + 4] = _mm512_and_si512(_mm512_srli_epi16(bytes, 4), low);
        } else {
            w.v[j] = _mm512_xor_si512(bytes, top);
            w.v[j + 4] = _mm512_xor_si512(_mm512_loadu_si512((const void *)(data + (j + 4) * 64)), top);
        }
    }
    return w;
}

/* The instruction multiplies unsigned by signed bytes: signed weights were moved up by 128, and 128 times the total of
 * the row's values is taken off again. All of it is exact. */
INLINE void dots(const int R, const int is_q4, const weights *w, const int8_t *x, const int32_t *totals, vf *out)
{
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
        __m512i s = is_q4 ? _mm512_setzero_si512() : _mm512_set1_epi32(-128 * totals[r]);
#pragma GCC unroll 8
        for (int j = 0; j < 8; j++) {
            int32_t four;
            memcpy(&four, x + r * BLOCK + 4 * j, 4);
            s = _mm512_dpbusd_epi32(s, w->v[j], _mm512_set1_epi32(four));
        }
        out[r] = (vf)_mm512_cvtepi32_ps(s);
    }
}

#endif
