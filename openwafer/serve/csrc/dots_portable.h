/* Products of blocks, the definition: `weights` are 32 inputs of the next STEP outputs, unpacked; `dots` multiplies
 * them with R rows' 32 values. */
#ifndef DOTS_PORTABLE_H
#define DOTS_PORTABLE_H

#include "decoder.h"

#define STEP LANES
typedef struct { int16_t v[8][4][LANES]; } weights; /* [4 inputs][input][output] */

INLINE weights load_weights(const int is_q4, const uint8_t *data, int lane)
{
    weights w;
    for (int j = 0; j < 8; j++)
        for (int b = 0; b < 4; b++)
            for (int i = 0; i < LANES; i++) {
                int at = (lane + i) * 4 + b;
                if (!is_q4) w.v[j][b][i] = ((const int8_t *)data)[j * 64 + at];
                else w.v[j][b][i] = j < 4 ? data[j * 64 + at] & 15 : data[(j - 4) * 64 + at] >> 4;
            }
    return w;
}

INLINE void dots(const int R, const int is_q4, const weights *w, const int8_t *x, const int32_t *totals, vf *out)
{
    (void)is_q4, (void)totals;
    for (int r = 0; r < R; r++) {
        vi s = { 0 };
        for (int k = 0; k < BLOCK; k++)
            for (int i = 0; i < LANES; i++) s[i] += w->v[k / 4][k % 4][i] * x[r * BLOCK + k];
        out[r] = __builtin_convertvector(s, vf);
    }
}

#endif
