/* Cores: tasks, the main thread, issuing and completing fabric instructions. The rules are those of core.py. */
#include "engine.h"
#include <stdlib.h>
#include <string.h>

#define READY_NONE (-1) /* ready_at of a main thread that waits for a task or for its fabric instruction */

static i32 *registers_of(Engine *e, u32 pe) { return e->registers + (size_t)pe * (size_t)e->costs.num_registers; }

static float float_of(i32 bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static i32 bits_of(float value) {
    i32 bits;
    memcpy(&bits, &value, 4);
    return bits;
}

static i32 length_of(Engine *e, u32 pe, const i32 *row) {
    if (row[F_LENGTH_REG] < 0) return row[F_LENGTH];
    i32 length = registers_of(e, pe)[row[F_LENGTH_REG]];
    return length > 0 ? length : 0;
}

static i32 address_of(Engine *e, u32 pe, const i32 *row, int field) {
    return row[field + 1] + (row[field + 2] < 0 ? 0 : registers_of(e, pe)[row[field + 2]]);
}

/* First and past-the-last byte of a memory operand; 0 if it reaches outside the PE's memory. */
static int range_of(Engine *e, u32 pe, const i32 *row, int field, i32 length, i32 dtype, i64 *low, i64 *high) {
    i64 size = type_bytes(dtype), first = address_of(e, pe, row, field), last = first;
    *low = *high = 0;
    if (length == 0) return 1;
    last += (length - 1) * size * row[field + 3];
    *low = first < last ? first : last;
    *high = (first < last ? last : first) + size;
    return first % size == 0 && *low >= 0 && *high <= e->programs[e->pes[pe].program].memory_bytes;
}

static u8 *memory_of(Engine *e, u32 pe, i32 address) { return e->memory + e->pes[pe].memory + address; }

static void load_operand(Engine *e, u32 pe, const i32 *row, int field, i32 length, i32 dtype, float *to) {
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
static int check_operands(Engine *e, u32 pe, const i32 *row, i32 length, int *overlaps) {
    static const int fields[3] = {F_A, F_B, F_DST};
    const Pe *p = e->pes + pe;
    *overlaps = p->registers_pending > 0;
    for (int i = 0; i < 3; i++) {
        i64 low, high;
        if (row[fields[i]] != KIND_MEM) continue;
        i32 dtype = fields[i] == F_DST && row[F_OP] == OP_CONVERT ? row[F_IMM] : row[F_DTYPE];
        if (!range_of(e, pe, row, fields[i], operand_length(row, fields[i], length), dtype, &low, &high)) return 0;
        if (!p->num_receives) continue;
        for (int thread = 0; thread < NUM_THREADS; thread++) {
            if (p->threads[thread] == NIL) continue;
            const Operation *op = e->operations + p->threads[thread];
            if (op->writes_memory && low < op->high && high > op->low) *overlaps = 1;
        }
    }
    return 1;
}

static void finish(Engine *e, u32 pe, const i32 *row, i32 length, float *a, float *b) {
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
    store_elements(dtype, to, row[F_DST + 3], length, a);
}

static i32 run_vector(Engine *e, u32 pe, const i32 *row, i32 length) {
    i32 addresses[3];
    addresses[0] = address_of(e, pe, row, F_A);
    addresses[1] = address_of(e, pe, row, F_B);
    addresses[2] = address_of(e, pe, row, F_DST);
    if (row[F_OP] == OP_TILE) {
        tile(row[F_DTYPE], memory_of(e, pe, addresses[2]), memory_of(e, pe, addresses[0]),
             memory_of(e, pe, addresses[1]), length, row[F_N], row[F_K]);
        return tile_cost(&e->costs, row[F_DTYPE], length, row[F_N], row[F_K], row[F_IMM]);
    }
    load_operand(e, pe, row, F_A, length, row[F_DTYPE], e->scratch[0]);
    load_operand(e, pe, row, F_B, length, row[F_DTYPE], e->scratch[1]);
    finish(e, pe, row, length, e->scratch[0], e->scratch[1]);
    return vector_cost(&e->costs, row, length, addresses);
}

/* -- fabric instructions ------------------------------------------------------------------------------------------ */

/* Plain copies of contiguous elements need no arithmetic: half of all traffic. */
static int is_copy(const i32 *row, int memory) {
    return row[F_OP] == OP_MOV && row[memory] == KIND_MEM && row[memory + 3] == 1 && !row[F_SKIP_ZEROS];
}

static void send_words(Engine *e, Operation *op) {
    const i32 *row = op->row;
    i32 dtype = row[F_DTYPE], length = op->length;
    if (is_copy(row, F_A)) {
        const u8 *from = memory_of(e, op->pe, address_of(e, op->pe, row, F_A));
        op->out = new_stream(e, (u32)length);
        if (type_bytes(dtype) == 4) memcpy(op->out->words, from, 4 * (size_t)length);
        else
            for (i32 i = 0; i < length; i++) op->out->words[i] = ((const u16 *)from)[i];
        return;
    }
    float *a = e->scratch[0], *b = e->scratch[1];
    load_operand(e, op->pe, row, F_A, length, dtype, a);
    load_operand(e, op->pe, row, F_B, length, dtype, b);
    compute(row[F_OP], dtype, length, a, b, NULL, a);
    if (!row[F_SKIP_ZEROS]) {
        op->out = new_stream(e, (u32)op->remaining);
        elements_to_words(dtype, op->out->words, length, a);
        return;
    }
    op->remaining = 0;
    u16 *halves = (u16 *)e->scratch[1];
    store_elements(T_F16, (u8 *)halves, 1, length, a);
    for (i32 i = 0; i < length; i++) op->remaining += (halves[i] & 0x7FFF) != 0;
    op->out = new_stream(e, (u32)op->remaining);
    u32 next = 0;
    for (i32 i = 0; i < length; i++)
        if (halves[i] & 0x7FFF) op->out->words[next++] = (u32)i << 16 | halves[i];
}

/* The main thread waits for it and nothing else runs: its operands cannot change before they are used. */
static int is_alone(const Engine *e, const Operation *op) {
    if (op->thread != MAIN_THREAD) return 0;
    for (int thread = 0; thread < MAIN_THREAD; thread++)
        if (e->pes[op->pe].threads[thread] != NIL) return 0;
    return 1;
}

/* The operand that is not the stream: as read at issue, or from memory, into `scratch`; NULL if there is none. */
static float *operand_from(Engine *e, const Operation *op, u32 first, i32 count, float *scratch) {
    const i32 *row = op->row;
    if (op->operand) return (float *)op->operand->words + first;
    int other = row[F_A] == KIND_FABRIC ? F_B : F_A;
    if (row[other] == KIND_NONE) return NULL;
    if (row[other] == KIND_MEM) {
        i32 stride = row[other + 3], address = address_of(e, op->pe, row, other);
        address += (i32)first * stride * (i32)type_bytes(row[F_DTYPE]);
        load_elements(row[F_DTYPE], memory_of(e, op->pe, address), stride, count, scratch);
    } else
        load_operand(e, op->pe, row, other, count, row[F_DTYPE], scratch);
    return scratch;
}

static void prepare(Engine *e, Operation *op, int reads) {
    const i32 *row = op->row;
    if (row[F_OP] == OP_CONTROL) {
        op->out = new_stream(e, 1);
        op->out->control = 1;
        op->out->words[0] = 0;
    } else if (!reads) send_words(e, op);
    else {
        int other = reads == F_A ? F_B : F_A;
        if (row[other] != KIND_NONE && !is_alone(e, op)) {
            op->operand = new_stream(e, (u32)op->length);
            load_operand(e, op->pe, row, other, op->length, row[F_DTYPE], (float *)op->operand->words);
        }
    }
}

/* The words that a stream-to-stream instruction sends for words `offset`... of its input; `first` is its own count. */
Stream *forward_stream(Engine *e, Operation *op, const Stream *in, u32 offset, u32 count, u32 first) {
    const i32 *row = op->row;
    i32 dtype = row[F_DTYPE], elements = (i32)count;
    Stream *out = new_stream(e, count);
    float *a = e->scratch[0], *b = operand_from(e, op, first, elements, e->scratch[1]);
    words_to_elements(dtype, in->words + offset, elements, a);
    if (row[F_B] == KIND_FABRIC) compute(row[F_OP], dtype, elements, b, a, NULL, a);
    else compute(row[F_OP], dtype, elements, a, b, NULL, a);
    elements_to_words(dtype, out->words, elements, a);
    return out;
}

static u32 new_operation(Engine *e) {
    u32 index = e->free_operation;
    if (index != NIL) e->free_operation = e->operations[index].next_free;
    else {
        e->operations = grow(e, e->operations, &e->room_operations, e->num_operations + 1, sizeof(Operation));
        index = e->num_operations++;
        memset(e->operations + index, 0, sizeof(Operation));
    }
    return index;
}

/* Whether another instruction of the PE holds the thread or a queue. */
static int is_busy(Engine *e, u32 pe, u32 thread, u32 input, u32 output, i32 *fault, i32 *detail) {
    if (e->pes[pe].threads[thread] != NIL) {
        *fault = FAULT_THREAD_BUSY;
        *detail = (i32)thread;
        return 1;
    }
    u32 wanted[2] = {input, output};
    for (int i = 0; i < 2; i++)
        if (wanted[i] != NIL && e->nodes[wanted[i]].operation != NIL) {
            *fault = FAULT_QUEUE_BUSY;
            *detail = e->nodes[wanted[i]].colour;
            return 1;
        }
    return 0;
}

/* Issue in cycle `now`. The main thread may be ahead of the present t: then only if nothing can change until `now`;
 * returns 0 if it has to be tried again in its own cycle. */
static int issue(Engine *e, u32 pe, const i32 *row, i32 length, int inside, i32 now, i32 t) {
    Pe *p = e->pes + pe;
    i32 fault, detail;
    int reads = row[F_A] == KIND_FABRIC ? F_A : row[F_B] == KIND_FABRIC ? F_B : 0;
    u32 thread = row[F_THREAD] < 0 ? MAIN_THREAD : (u32)row[F_THREAD];
    u32 input = reads ? node_of(e, pe, NODE_INPUT, (u32)row[reads + 1]) : NIL;
    u32 output = row[F_DST] == KIND_FABRIC ? node_of(e, pe, NODE_OUTPUT, (u32)row[F_DST + 1]) : NIL;
    if (is_busy(e, pe, thread, input, output, &fault, &detail)) {
        if (now == t) fail(e, fault, pe, t, detail);
        return 0;
    }
    if (!inside) {
        fail(e, FAULT_OUT_OF_BOUNDS, pe, t, p->pc);
        return 0;
    }
    u32 index = new_operation(e);
    Operation *op = e->operations + index;
    Run *pieces = op->pieces;
    u32 room = op->room_pieces;
    i32 start = now + e->costs.fabric_startup;
    *op = (Operation){.pe = pe, .input = input, .output = output, .row = row, .start = start, .remaining = length,
                      .done_at = NEVER, .length = length, .waits_since = -1, .thread = (u8)thread, .pieces = pieces,
                      .room_pieces = room, .next_free = NIL};
    prepare(e, op, reads);
    if (reads && row[F_DST] == KIND_MEM) {
        i64 low, high;
        range_of(e, pe, row, F_DST, length, row[F_DTYPE], &low, &high);
        op->low = (i32)low;
        op->high = (i32)high;
        op->writes_memory = 1;
        p->num_receives++;
    }
    if (reads && row[F_DST] == KIND_REG) p->registers_pending++;
    p->threads[thread] = index;
    if (input != NIL) e->nodes[input].operation = index;
    if (output != NIL) e->nodes[output].operation = index;
    if (op->remaining) schedule(e, ID_OPERATION | index, start);
    else {
        op->done_at = start;
        schedule(e, ID_PE | pe, start);
    }
    return 1;
}

static void receive_copy(Engine *e, const Operation *op) {
    const i32 *row = op->row;
    u32 size = type_bytes(row[F_DTYPE]);
    u8 *to = memory_of(e, op->pe, address_of(e, op->pe, row, F_DST));
    for (u32 i = 0; i < op->num_pieces; i++) {
        const Run *piece = op->pieces + i;
        const u32 *words = piece->stream->words + piece->offset;
        if (size == 4) memcpy(to, words, 4 * (size_t)piece->count);
        else
            for (i32 j = 0; j < piece->count; j++) ((u16 *)to)[j] = (u16)words[j];
        to += size * (u32)piece->count;
    }
}

static void receive(Engine *e, Operation *op) {
    const i32 *row = op->row;
    if (is_copy(row, F_DST)) {
        receive_copy(e, op);
        return;
    }
    float *a = e->scratch[0], *b;
    u32 *words = (u32 *)e->scratch[1], filled = 0;
    for (u32 i = 0; i < op->num_pieces; i++) {
        const Run *piece = op->pieces + i;
        memcpy(words + filled, piece->stream->words + piece->offset, 4 * (size_t)piece->count);
        filled += (u32)piece->count;
    }
    words_to_elements(row[F_DTYPE], words, op->length, a);
    b = operand_from(e, op, 0, op->length, e->scratch[1]);
    if (row[F_B] == KIND_FABRIC) {
        if (b != e->scratch[1]) memcpy(e->scratch[1], b, 4 * (size_t)op->length);
        finish(e, op->pe, row, op->length, e->scratch[1], a);
    } else
        finish(e, op->pe, row, op->length, a, b);
}

static void later(Engine *e, u32 pe, Pe *p, i32 now) {
    p->ready_at = now;
    schedule(e, ID_PE | pe, now);
}

static void complete(Engine *e, Pe *p, u32 thread, i32 t) {
    u32 index = p->threads[thread];
    Operation *op = e->operations + index;
    const i32 *row = op->row;
    if (op->input != NIL && op->output == NIL) receive(e, op);
    if (row[F_THEN] >= 0) p->activated |= 1u << row[F_THEN];
    if (op->writes_memory) p->num_receives--;
    if (op->input != NIL && row[F_DST] == KIND_REG) p->registers_pending--;
    if (op->input != NIL) e->nodes[op->input].operation = NIL;
    if (op->output != NIL) e->nodes[op->output].operation = NIL;
    for (u32 i = 0; i < op->num_pieces; i++) release(op->pieces[i].stream);
    release(op->out);
    release(op->in);
    release(op->operand);
    if (e->tracing) add_span(e, op->pe, 100 + (i32)thread, op->start - e->costs.fabric_startup, t);
    op->pe = NIL;
    op->num_pieces = 0;
    op->remaining = 0;
    op->next_free = e->free_operation;
    e->free_operation = index;
    p->threads[thread] = NIL;
    if (t > p->last_event) p->last_event = t; /* the main thread may have run ahead */
    if (thread == MAIN_THREAD) p->ready_at = t;
    if (thread == p->waits_for) {
        p->waits_for = NUM_THREADS;
        p->busy += e->costs.task_start;
        later(e, (u32)(p - e->pes), p, t + e->costs.task_start);
    }
}

/* -- the main thread ----------------------------------------------------------------------------------------------- */

static i32 scalar_step(Engine *e, u32 pe, Pe *p, const i32 *row) {
    i32 *r = registers_of(e, pe), *dst = r + row[F_DST + 1], a = r[row[F_A + 1]], imm = row[F_IMM], op = row[F_OP];
    i32 other = row[F_B] == KIND_REG ? r[row[F_B + 1]] : imm;
    switch (op) {
    case OP_SET: *dst = imm; break;
    case OP_IADD: *dst = (i32)((u32)a + (u32)other); break;
    case OP_IMUL: *dst = (i32)((u32)a * (u32)other); break;
    case OP_FADD: *dst = bits_of(float_of(a) + float_of(other)); break;
    case OP_FMUL: *dst = bits_of(float_of(a) * float_of(other)); break;
    case OP_FMAX: *dst = float_of(a) > float_of(other) ? a : other; break;
    case OP_FEXP: case OP_FRSQRT: case OP_FRECIP: *dst = bits_of(slow_function(op, float_of(a))); return e->costs.divide;
    case OP_UNPACK:
        *dst = (i32)((u32)a >> 16);
        r[row[F_B + 1]] = bits_of(half_to_float((u16)a));
        break;
    case OP_LOAD: {
        float value;
        load_operand(e, pe, row, F_A, 1, row[F_DTYPE], &value);
        *dst = bits_of(value);
        break;
    }
    case OP_STORE: {
        float value = float_of(a);
        store_elements(row[F_DTYPE], memory_of(e, pe, address_of(e, pe, row, F_DST)), 1, 1, &value);
        break;
    }
    case OP_LOOP:
        *dst = 0;
        if (length_of(e, pe, row) <= 0) p->pc = row[F_TARGET] + 1;
        return 0;
    case OP_ENDLOOP:
        if (++*dst < length_of(e, pe, row)) p->pc = row[F_TARGET] + 1;
        return imm;
    case OP_ADVANCE: advance_switch(e, node_of(e, pe, NODE_ROUTER, (u32)imm), e->now); break;
    case OP_ILT: *dst = a < other; break;
    case OP_IEQ: *dst = a == other; break;
    case OP_BRANCH: if (a == 0) p->pc = imm; break;
    case OP_ACTIVATE: p->activated |= 1u << imm; break;
    case OP_BLOCK: p->blocked |= 1u << imm; break;
    case OP_UNBLOCK: p->blocked &= ~(1u << imm); break;
    }
    return e->costs.scalar;
}

/* The next task, or -1; a data task takes its wavelet. */
static i32 choose(Engine *e, u32 pe, Pe *p, i32 t) {
    const Program *program = e->programs + p->program;
    for (i32 i = 0; i < program->num_tasks; i++) {
        const i32 *task = program->tasks + 4 * i;
        if (p->blocked >> i & 1) continue;
        if (task[1] >= 0) {
            Node *node = e->nodes + node_of(e, pe, NODE_INPUT, (u32)task[1]);
            if (node->operation == NIL && node->head != NIL) {
                const Run *run = e->runs + node->head;
                i32 arrives = run->arrives + node->taken;
                if (arrives <= t) {
                    registers_of(e, pe)[task[2]] = (i32)run->stream->words[run->offset + (u32)node->taken];
                    settle(node, t);
                    node->occupied--;
                    node->taken++;
                    if (run->count != OPEN && run->count == node->taken) pop_run(e, node);
                    wake_feeders(e, node, t + 1);
                    return i;
                }
                schedule(e, ID_PE | pe, arrives);
            }
        }
        if (p->activated >> i & 1) {
            p->activated &= ~(1u << i);
            return i;
        }
    }
    return -1;
}

/* One instruction at local time `now`; returns its cycles, or -1 if it has to wait for its own cycle or is issued. */
static i32 execute(Engine *e, u32 pe, Pe *p, const i32 *row, i32 now, i32 t) {
    int overlaps;
    i32 op = row[F_OP], length = op <= OP_CONTROL ? length_of(e, pe, row) : row[F_LENGTH];
    int fabric = row[F_DST] == KIND_FABRIC || row[F_A] == KIND_FABRIC || row[F_B] == KIND_FABRIC;
    int inside = check_operands(e, pe, row, length, &overlaps) && length <= MAX_LENGTH;
    int waits = op == OP_WAIT && p->threads[row[F_IMM]] != NIL;
    if (now > t && (!inside || overlaps || waits || op == OP_ADVANCE)) {
        later(e, pe, p, now);
        return -1;
    }
    if (!inside && !fabric) {
        fail(e, FAULT_OUT_OF_BOUNDS, pe, t, p->pc);
        return -1;
    }
    if (fabric) {
        int sync = row[F_THREAD] < 0;
        if (!issue(e, pe, row, length, inside, now, t)) {
            if (!e->fault) later(e, pe, p, now);
            return -1;
        }
        p->last_event = now;
        p->pc++;
        p->busy += e->costs.fabric_startup;
        if (sync) p->ready_at = READY_NONE;
        return sync ? -1 : e->costs.fabric_startup;
    }
    p->last_event = now;
    p->pc++;
    if (waits) {
        p->waits_for = (u8)row[F_IMM];
        p->ready_at = READY_NONE;
        return -1;
    }
    if (op == OP_WAIT) {
        p->busy += e->costs.task_start;
        return e->costs.task_start;
    }
    i32 cycles = op <= OP_TILE ? run_vector(e, pe, row, length) : scalar_step(e, pe, p, row);
    p->busy += cycles;
    return cycles;
}

void step_pe(Engine *e, u32 pe, i32 t) {
    Pe *p = e->pes + pe;
    if (p->program < 0) return;
    for (u32 thread = 0; thread < NUM_THREADS; thread++)
        if (p->threads[thread] != NIL && e->operations[p->threads[thread]].done_at == t) complete(e, p, thread, t);
    if (p->ready_at == READY_NONE && p->pc < 0) p->ready_at = t; /* idle: look for a task */
    if (p->ready_at != t) return;
    const Program *program = e->programs + p->program;
    i32 now = t;
    while (!e->fault) {
        if (p->pc < 0) {
            if (now > t) {
                later(e, pe, p, now);
                return;
            }
            i32 task = choose(e, pe, p, t);
            if (task < 0) {
                p->ready_at = READY_NONE;
                return;
            }
            p->pc = program->tasks[4 * task];
            if (t > p->last_event) p->last_event = t;
            p->busy += e->costs.task_start;
            now += e->costs.task_start;
            if (e->tracing) e->task_started[2 * pe] = t, e->task_started[2 * pe + 1] = task;
            continue;
        }
        const i32 *row = program->code + (size_t)p->pc * INSTRUCTION_WORDS;
        if (row[F_OP] == OP_END) {
            p->pc = -1;
            p->last_event = now;
            if (e->tracing) add_span(e, pe, e->task_started[2 * pe + 1], e->task_started[2 * pe], now);
            continue;
        }
        if (now > e->max_cycles) {
            later(e, pe, p, now);
            return;
        }
        i32 cycles = execute(e, pe, p, row, now, t);
        if (cycles < 0) return;
        now += cycles;
    }
}
