/* Fabric instructions: issuing them, the words they send, what they write when they complete. */
#include "engine.h"
#include <string.h>

/* Plain copies of contiguous elements need no arithmetic: half of all traffic. */
static int is_copy(const i32 *row, int memory) {
    return row[F_OP] == OP_MOV && row[memory] == KIND_MEM && row[memory + 3] == 1 && !row[F_SKIP_ZEROS];
}

static void send_words(Engine *e, Operation *op) {
    const i32 *row = op->row;
    i32 dtype = row[F_DTYPE], length = op->length;
    if (is_copy(row, F_A)) {
        i32 address = address_of(e, op->pe, row, F_A);
        if (length >= MIN_LOAN) {
            op->out = lend(e, op->pe, address, dtype, (u32)length);
            return;
        }
        const u8 *from = memory_of(e, op->pe, address);
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
    return op->thread == MAIN_THREAD && !e->pes[op->pe].running;
}

/* The operand that is not the stream: as read at issue, or from memory, into `scratch`; NULL if there is none. */
static float *operand_from(Engine *e, const Operation *op, u32 first, i32 count, float *scratch) {
    const i32 *row = op->row;
    if (op->operand && op->operand->kind == STREAM_MEMORY) {
        size_t start = (size_t)type_bytes(row[F_DTYPE]) * first;
        load_elements(row[F_DTYPE], op->operand->memory + start, 1, count, scratch);
        return scratch;
    }
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
        int lends = row[other] == KIND_MEM && row[other + 3] == 1 && op->length >= MIN_LOAN;
        int alone = is_alone(e, op);
        if (lends && (op->output != NIL || !alone))
            op->operand = lend(e, op->pe, address_of(e, op->pe, row, other), row[F_DTYPE], (u32)op->length);
        else if (row[other] != KIND_NONE && !alone) {
            op->operand = new_stream(e, (u32)op->length);
            load_operand(e, op->pe, row, other, op->length, row[F_DTYPE], (float *)op->operand->words);
        }
    }
}

/* The words that a stream-to-stream instruction sends for words `offset`... of its input; `first` is its own count. */
Stream *forward_stream(Engine *e, Operation *op, Stream *in, u32 offset, u32 count, u32 first) {
    const i32 *row = op->row;
    i32 dtype = row[F_DTYPE], elements = (i32)count;
    int plain = row[row[F_A] == KIND_FABRIC ? F_B : F_A] == KIND_NONE;
    if (count >= MIN_LOAN && (plain || (op->operand && op->operand->kind == STREAM_MEMORY)))
        return derive(e, row, in, offset, op->operand, first, count);
    Stream *out = new_stream(e, count);
    float *a = e->scratch[0], *b = operand_from(e, op, first, elements, e->scratch[1]);
    read_words(e, in, offset, count, out->words);
    words_to_elements(dtype, out->words, elements, a);
    if (row[F_B] == KIND_FABRIC) compute(row[F_OP], dtype, elements, b, a, NULL, a);
    else compute(row[F_OP], dtype, elements, a, b, NULL, a);
    elements_to_words(dtype, out->words, elements, a);
    return out;
}

static u32 new_operation(Engine *e) {
    u32 index = e->free_operation;
    if (index != NIL) {
        e->free_operation = e->operations[index].next_free;
        ask_record(e->operations + e->free_operation, sizeof(Operation)); /* for the next one */
    } else {
        index = e->num_operations++; /* there is room for all threads of all PEs */
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
int issue(Engine *e, u32 pe, const i32 *row, i32 length, int inside, i32 now, i32 t) {
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
        p->receiving |= (u16)(1 << thread);
    }
    if (reads && row[F_DST] == KIND_REG) p->registers_pending++;
    p->threads[thread] = index;
    p->running |= (u16)(1 << thread);
    if (input != NIL) e->nodes[input].operation = index;
    if (output != NIL) e->nodes[output].operation = index;
    if (op->remaining && input != NIL && e->nodes[input].head == NIL) { /* the first word will wake it */
        op->waits_since = start;
        op->cause = WAIT_WORDS;
    } else if (op->remaining) schedule(e, ID_OPERATION | index, start);
    else {
        op->done_at = start;
        p->finished |= (u16)(1 << thread);
        schedule(e, ID_PE | pe, start);
    }
    return 1;
}

static void receive_copy(Engine *e, Operation *op) {
    const i32 *row = op->row;
    u32 size = type_bytes(row[F_DTYPE]);
    u8 *to = memory_of(e, op->pe, address_of(e, op->pe, row, F_DST));
    free_target(e, op->pe, row, op->length, row[F_DTYPE]);
    for (u32 i = 0; i < op->num_pieces; i++) {
        const Run *piece = piece_of(op, i);
        u32 *words = size == 4 ? (u32 *)to : (u32 *)e->scratch[0];
        read_words(e, piece->stream, piece->offset, (u32)piece->count, words);
        if (size == 2)
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
        const Run *piece = piece_of(op, i);
        read_words(e, piece->stream, piece->offset, (u32)piece->count, words + filled);
        filled += (u32)piece->count;
    }
    words_to_elements(row[F_DTYPE], words, op->length, a);
    b = operand_from(e, op, 0, op->length, e->scratch[1]);
    if (op->operand && op->operand->kind == STREAM_MEMORY) { /* read, and perhaps about to be overwritten */
        release(op->operand);
        op->operand = NULL;
    }
    if (row[F_B] == KIND_FABRIC) {
        if (b != e->scratch[1]) memcpy(e->scratch[1], b, 4 * (size_t)op->length);
        finish(e, op->pe, row, op->length, e->scratch[1], a);
    } else
        finish(e, op->pe, row, op->length, a, b);
}

void later(Engine *e, u32 pe, Pe *p, i32 now) {
    p->ready_at = now;
    schedule(e, ID_PE | pe, now);
}

void forget_streams(Operation *op) {
    int receives = op->input != NIL && op->output == NIL;
    for (u32 i = 0; i < op->num_pieces; i++) release(piece_of(op, i)->stream);
    if (!receives) {
        release(op->out);
        release(op->in);
    }
    release(op->operand);
}

void complete(Engine *e, Pe *p, u32 thread, i32 t) {
    u32 index = p->threads[thread];
    Operation *op = e->operations + index;
    const i32 *row = op->row;
    if (op->input != NIL && op->output == NIL) receive(e, op);
    if (row[F_THEN] >= 0) p->activated |= 1u << row[F_THEN];
    p->receiving &= (u16)~(1 << thread);
    p->running &= (u16)~(1 << thread);
    p->finished &= (u16)~(1 << thread);
    if (op->input != NIL && row[F_DST] == KIND_REG) p->registers_pending--;
    if (op->input != NIL) e->nodes[op->input].operation = NIL;
    if (op->output != NIL) e->nodes[op->output].operation = NIL;
    forget_streams(op);
    if (e->tracing) add_span(e, op->pe, 100 + (i32)thread, op->start - e->costs.fabric_startup, t);
    op->pe = NIL;
    op->num_pieces = 0;
    op->remaining = 0;
    op->next_free = e->free_operation;
    e->free_operation = index;
    p->threads[thread] = NIL;
    if (t > p->last_event) p->last_event = t; /* the main thread may have run ahead */
    if (thread == MAIN_THREAD) p->ready_at = t, p->busy += op->taken;
    if (thread == p->waits_for) {
        p->waits_for = NUM_THREADS;
        p->busy += e->costs.task_start;
        later(e, (u32)(p - e->pes), p, t + e->costs.task_start);
    }
}
