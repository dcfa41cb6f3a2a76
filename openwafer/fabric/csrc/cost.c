/* Cycles of instructions over memory: cost.py in C. */
#include "engine.h"

static i32 write_waits(const Costs *costs, i32 groups) {
    return costs->write_buffer_16 >= 0 && groups > costs->write_buffer_16 ? (groups - costs->write_buffer_16) / 2 : 0;
}

/* addresses: of a, b and dst in this order, for those that are in memory. */
i32 vector_cost(const Costs *costs, const i32 *row, i32 length, const i32 *addresses) {
    i32 op = row[F_OP], wide = 1, conflict = 0, num_read = 0, banks[3];
    static const int fields[3] = {F_A, F_B, F_DST};
    if (op == OP_EXP || op == OP_RSQRT || op == OP_RECIP) return costs->vector_startup + length * costs->divide;
    for (int i = 0; i < 3; i++) {
        if (row[fields[i]] != KIND_MEM) continue;
        if (row[fields[i] + 3] != 1 || addresses[i] % 8 != 0) wide = 0;
        if (fields[i] != F_DST || op == OP_MAC) banks[num_read++] = addresses[i] / costs->bank_bytes % 4;
    }
    for (int i = 0; i < num_read; i++)
        for (int j = 0; j < i; j++) conflict |= banks[i] == banks[j];
    i32 size = type_bytes(row[F_DTYPE]);
    i32 lanes = !wide ? 1 : size == 4 ? 2 : costs->simd_16;
    i32 per_group = wide && size == 2 ? costs->group_cycles_16 : 1;
    i32 groups = (length + lanes - 1) / lanes;
    i32 cycles = costs->vector_startup + groups * per_group * (1 + conflict) - costs->vector_overlap;
    if (size == 2 && wide && row[F_DST] == KIND_MEM && num_read > 1) cycles += write_waits(costs, groups);
    return cycles > costs->vector_minimum ? cycles : costs->vector_minimum;
}

i32 tile_cost(const Costs *costs, i32 dtype, i32 m, i32 n, i32 k, i32 outer_n) {
    i32 size = type_bytes(dtype);
    i32 lanes = size == 4 ? 2 : costs->simd_16, per_group = size == 2 ? costs->group_cycles_16 : 1;
    i32 groups = (m + lanes - 1) / lanes;
    i32 column = costs->vector_startup + groups * per_group - costs->vector_overlap;
    if (size == 2) column += write_waits(costs, groups);
    if (column < costs->vector_minimum) column = costs->vector_minimum;
    return (outer_n ? n : k) * costs->loop_outer + k * n * (costs->loop_inner + column);
}
