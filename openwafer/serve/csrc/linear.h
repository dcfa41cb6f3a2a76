/* What the loops of a matrix product have in common. */
#ifndef LINEAR_H
#define LINEAR_H

#include "decoder.h"

INLINE vf load_scales(const uint8_t *p, int is_wide, int v)
{
    return is_wide ? load((const float *)p + v * LANES) : load_half((const half_t *)p + v * LANES);
}

/* Sums of one row and `count` outputs from `output` on go where they belong. */
INLINE void finish(const operation *op, int row, int64_t output, int count, const float *sums)
{
    float *out = op->dst.base + row * op->dst.stride + output;
    if (op->vector && op->flags)
        for (int i = 0; i < count; i++) out[i] += sums[i] + op->vector[output + i];
    else if (op->vector)
        for (int i = 0; i < count; i++) out[i] = sums[i] + op->vector[output + i];
    else if (op->flags)
        for (int i = 0; i < count; i++) out[i] += sums[i];
    else
        for (int i = 0; i < count; i++) out[i] = sums[i];
}

/* amx.c: as linear_groups, with packed weights */
#if defined(__AMX_INT8__) && defined(__AVX512VNNI__)
#define HAS_AMX 1
int amx_works(void);
void amx_groups(const program *p, const operation *op, int num_rows, int first, int last);
#else
#define HAS_AMX 0
#endif

#endif
