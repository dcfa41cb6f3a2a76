/* Operands of an instruction in memory and registers, and instructions over memory. The rules are those of core.py. */
#include "engine.h"
#include <string.h>

i32 *registers_of(Engine *e, u32 pe) { return e->registers + (size_t)pe * (size_t)e->costs.num_registers; }

float float_of(i32 bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

i32 bits_of(float value) {
    i32 bits;
    memcpy(&bits, &value, 4);
    return bits;
}

i32 length_of(Engine *e, u32 pe, const i32 *row) {
    if (row[F_LENGTH_REG] < 0) return row[F_LENGTH];
    i32 length = registers_of(e, pe)[row[F_LENGTH_REG]];
    return length > 0 ? length : 0;
}

i32 address_of(Engine *e, u32 pe, const i32 *row, int field) {
    return row[field + 1] + (row[field + 2] < 0 ? 0 : registers_of(e, pe)[row[field + 2]]);
}

/* First and past-the-last byte of a memory operand; 0 if it reaches outside the PE's memory. */
int range_of(Engine *e, u32 pe, const i32 *row, int field, i32 length, i32 dtype, i64 *low, i64 *high) {
    i64 size = type_bytes(dtype), first = address_of(e, pe, row, field), last = first;
    *low = *high = 0;
    if (length == 0) return 1;
    last += (length - 1) * size * row[field + 3];
    *low = first < last ? first : last;
    *high = (first < last ? last : first) + size;
    return first % size == 0 && *low >= 0 && *high <= e->programs[e->pes[pe].program].memory_bytes;
}

u8 *memory_of(Engine *e, u32 pe, i32 address) { return e->memory + e->pes[pe].memory + address; }

void load_operand(Engine *e, u32 pe, const i32 *row, int field, i32 length, i32 dtype, float *to) {
    if (row[field] == KIND_MEM)
        load_elements(dtype, memory_of(e, pe, address_of(e, pe, row, field)), row[field + 3], length, to);
    else if (row[field] == KIND_REG) {
        float value = float_of(registers_of(e, pe)[row[field + 1]]);
        for (i32 i = 0; i < length; i++) to[i] = value;
    }
}

/* Elements of operands in memory are where the encoding says, M*N and so on for TILE. */
static i32 operand_length(const i32 *row, int field, i32 length) {
    if (row[F_OP] != OP_TILE) return length;
    return field == F_DST ? length * row[F_N] : field == F_A ? length * row[F_K] : row[F_K] * row[F_N];
}

/* 0 if some operand is out of bounds. Sets *overlaps if a running receive will write what this touches. */
int check_operands(Engine *e, u32 pe, const i32 *row, i32 length, int *overlaps) {
    static const int fields[3] = {F_A, F_B, F_DST};
    const Pe *p = e->pes + pe;
    *overlaps = p->registers_pending > 0;
    for (int i = 0; i < 3; i++) {
        i64 low, high;
        if (row[fields[i]] != KIND_MEM) continue;
        i32 dtype = fields[i] == F_DST && row[F_OP] == OP_CONVERT ? row[F_IMM] : row[F_DTYPE];
        if (!range_of(e, pe, row, fields[i], operand_length(row, fields[i], length), dtype, &low, &high)) return 0;
        for (u32 rest = p->receiving; rest; rest &= rest - 1) {
            const Operation *op = e->operations + p->threads[__builtin_ctz(rest)];
            if (low < op->high && high > op->low) *overlaps = 1;
        }
    }
    return 1;
}

/* Before elements are written to the destination. */
void free_target(Engine *e, u32 pe, const i32 *row, i32 length, i32 dtype) {
    i64 low, high;
    if (!e->pes[pe].loans) return;
    range_of(e, pe, row, F_DST, length, dtype, &low, &high);
    before_write(e, pe, memory_of(e, pe, (i32)low), memory_of(e, pe, (i32)high));
}

void finish(Engine *e, u32 pe, const i32 *row, i32 length, float *a, float *b) {
    i32 op = row[F_OP], dtype = row[F_DTYPE];
    if (row[F_DST] == KIND_REG) {
        i32 *target = registers_of(e, pe) + row[F_DST + 1];
        if (op >= OP_SUM && op <= OP_MAXOF) *target = bits_of(reduce(op, dtype, float_of(*target), length, a, b));
        else if (length) {
            float last;
            compute(op, dtype, 1, a + length - 1, b ? b + length - 1 : NULL, NULL, &last);
            *target = bits_of(last);
        }
        return;
    }
    u8 *to = memory_of(e, pe, address_of(e, pe, row, F_DST));
    if (op == OP_MAC) load_elements(dtype, to, row[F_DST + 3], length, e->scratch[2]);
    compute(op, dtype, length, a, b, e->scratch[2], a);
    if (op == OP_CONVERT) {
        convert(dtype, row[F_IMM], length, a);
        dtype = row[F_IMM];
    }
    free_target(e, pe, row, length, dtype);
    store_elements(dtype, to, row[F_DST + 3], length, a);
}

i32 run_vector(Engine *e, u32 pe, const i32 *row, i32 length) {
    i32 addresses[3];
    addresses[0] = address_of(e, pe, row, F_A);
    addresses[1] = address_of(e, pe, row, F_B);
    addresses[2] = address_of(e, pe, row, F_DST);
    if (row[F_OP] == OP_TILE) {
        free_target(e, pe, row, length * row[F_N], row[F_DTYPE]);
        tile(row[F_DTYPE], memory_of(e, pe, addresses[2]), memory_of(e, pe, addresses[0]),
             memory_of(e, pe, addresses[1]), length, row[F_N], row[F_K]);
        return tile_cost(&e->costs, row[F_DTYPE], length, row[F_N], row[F_K], row[F_IMM]);
    }
    load_operand(e, pe, row, F_A, length, row[F_DTYPE], e->scratch[0]);
    load_operand(e, pe, row, F_B, length, row[F_DTYPE], e->scratch[1]);
    finish(e, pe, row, length, e->scratch[0], e->scratch[1]);
    return vector_cost(&e->costs, row, length, addresses);
}
