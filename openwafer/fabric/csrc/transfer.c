/* Fabric instructions as movers: when they start and stop moving words. The rules are those of reference.py. */
#include "engine.h"

static void add_piece(Engine *e, Operation *op, Run piece) {
    Run *last = op->num_pieces ? piece_of(op, op->num_pieces - 1) : NULL;
    if (last && last->stream == piece.stream && last->offset + (u32)last->count == piece.offset) return;
    op->pieces = grow(e, op->pieces, &op->room_pieces, op->num_pieces, sizeof(Run));
    retain(piece.stream);
    piece.count = 0;
    *piece_of(op, op->num_pieces++) = piece;
}

/* The stream that the words from the head run of the input turn into, and where in it they begin. */
static u32 output_offset(Engine *e, Operation *op, const Run *run, u32 offset) {
    if (op->in == run->stream && offset >= op->in_base && offset - op->in_base < op->out->size &&
        op->out_base + (offset - op->in_base) == op->taken)
        return offset - op->in_base;
    release(op->out);
    release(op->in);
    u32 count = run->stream->size - offset;
    if (count > (u32)op->remaining) count = (u32)op->remaining;
    op->out = forward_stream(e, op, run->stream, offset, count, op->taken);
    op->in = run->stream;
    retain(op->in);
    op->in_base = offset;
    op->out_base = op->taken;
    return 0;
}

static void begin_operation(Engine *e, u32 id, Operation *op, i32 t) {
    u32 out_offset = op->taken;
    op->fire_start = t;
    if (op->input != NIL) {
        Node *node = e->nodes + op->input;
        Run run = e->runs[node->head];
        node->fire_start = t;
        node->drained_at = t + op->remaining;
        if (run.count != OPEN && run.count - node->taken < op->remaining) schedule(e, id, t + run.count - node->taken);
        if (op->output == NIL) {
            run.offset += (u32)node->taken;
            add_piece(e, op, run);
        } else
            out_offset = output_offset(e, op, &run, run.offset + (u32)node->taken);
    }
    if (op->output != NIL) feed_open(e, op->output, id, op->out, out_offset, t + e->costs.forward_latency, t);
    schedule(e, id, t + op->remaining);
}

static void end_operation(Engine *e, Operation *op, i32 t) {
    i32 fired = t - op->fire_start;
    op->remaining -= fired;
    op->taken += (u32)fired;
    if (op->input != NIL) {
        Node *node = e->nodes + op->input;
        node->taken += fired;
        if (op->output == NIL) piece_of(op, op->num_pieces - 1)->count += fired;
        const Run *run = e->runs + node->head;
        if (run->count != OPEN && run->count == node->taken) pop_run(e, node);
    }
    if (op->output != NIL) feed_close(e, op->output, fired, t);
}

/* `cause`: why it cannot start again in this cycle, if that is known. */
static void stop_operation(Engine *e, u32 id, Operation *op, u8 cause, i32 t) {
    end_operation(e, op, t);
    op->firing = 0;
    if (op->input != NIL) {
        Node *node = e->nodes + op->input;
        settle(node, t);
        node->firing = 0;
        if (node->fed) schedule(e, node->feeder, t + node->capacity - occupied_at(node, t));
    }
    if (t - 1 > e->last_event) e->last_event = t - 1;
    if (op->remaining) {
        if (cause == WAIT_NONE) add_starter(e, id);
        else op->waits_since = t, op->cause = cause;
        return;
    }
    op->done_at = t;
    e->pes[op->pe].finished |= (u16)(1 << op->thread);
    e->ready_pes = grow(e, e->ready_pes, &e->room_ready, e->num_ready + 1, sizeof(u32));
    e->ready_pes[e->num_ready++] = op->pe;
}

/* Whether an operation that fires has come to the end of what arrived. */
static int lacks_words(const Engine *e, const Operation *op, i32 t) {
    if (op->input == NIL) return 0;
    const Node *node = e->nodes + op->input;
    const Run *run = e->runs + node->head;
    return run->count != OPEN && node->taken + t - op->fire_start == run->count &&
           (run->next == NIL || e->runs[run->next].arrives > t);
}

void continue_operation(Engine *e, u32 id, i32 t) {
    Operation *op = e->operations + (id & ID_INDEX);
    i32 fired = t - op->fire_start;
    if (op->remaining == fired) {
        stop_operation(e, id, op, WAIT_NONE, t);
        return;
    }
    if (op->output != NIL && !target_free(e, id, e->nodes + op->output, RAMP, t)) {
        stop_operation(e, id, op, lacks_words(e, op, t) ? WAIT_WORDS : WAIT_ROOM, t);
        return;
    }
    if (op->input != NIL) {
        Node *node = e->nodes + op->input;
        const Run *run = e->runs + node->head;
        if (run->count != OPEN && node->taken + fired == run->count) {
            if (run->next == NIL || e->runs[run->next].arrives > t) {
                stop_operation(e, id, op, WAIT_NONE, t);
            } else {
                end_operation(e, op, t);
                begin_operation(e, id, op, t);
            }
            return;
        }
    }
    if (op->output != NIL) schedule_full(e, id, e->nodes + op->output, t);
}

void start_operation(Engine *e, u32 id, i32 t) {
    Operation *op = e->operations + (id & ID_INDEX);
    if (op->firing || op->remaining == 0 || op->pe == NIL) return;
    Node *input = op->input == NIL ? NULL : e->nodes + op->input;
    if (t < op->start) { /* woken by a word that arrived early */
        if (op->waits_since >= 0) schedule(e, id, op->start);
        if (input) schedule_fill(e, input, t);
        return;
    }
    u8 cause = WAIT_NONE;
    if (input) {
        i32 arrives = input->head == NIL ? NEVER : e->runs[input->head].arrives + input->taken;
        if (arrives > t) {
            cause = WAIT_WORDS;
            if (arrives != NEVER) schedule(e, id, arrives);
        }
    }
    if (cause == WAIT_NONE && op->output != NIL && !target_free(e, id, e->nodes + op->output, RAMP, t)) cause = WAIT_ROOM;
    if (cause != WAIT_NONE) {
        if (op->waits_since < 0 || op->waits_since == t) op->waits_since = t, op->cause = cause;
        if (input) schedule_fill(e, input, t);
        return;
    }
    if (op->waits_since >= 0) e->stalls[op->cause] += t - op->waits_since;
    op->waits_since = -1;
    op->firing = 1;
    if (input) {
        settle(input, t);
        input->firing = 1;
        wake_feeders(e, input, t + 1);
    }
    begin_operation(e, id, op, t);
}

/* The first words for an instruction that waits and only writes memory or a register: it is certain now, in cycle t,
 * that it takes them as they arrive, which saves an event of its own. Until they arrive the words on their way count
 * as if they were being drained already; nobody else looks at this queue. */
int receive_at(Engine *e, Node *node, i32 arrives, i32 t) {
    if (node->kind != NODE_INPUT || node->operation == NIL || node->blocked) return 0;
    Operation *op = e->operations + node->operation;
    if (op->output != NIL || op->firing || op->remaining == 0 || op->start > arrives || op->waits_since < 0) return 0;
    e->stalls[op->cause] += arrives - op->waits_since;
    op->waits_since = -1;
    op->firing = 1;
    node->firing = 1;
    node->occupied = (i16)(node->occupied + arrives - t);
    begin_operation(e, ID_OPERATION | node->operation, op, arrives);
    return 1;
}
