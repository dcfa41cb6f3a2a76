/* Movers: when queues and fabric instructions start and stop moving words. The rules are those of reference.py. */
#include "engine.h"
#include <stdlib.h>

static u32 below(u32 mask, u32 colour) { return (u32)__builtin_popcount(mask & ((1u << colour) - 1)); }

u32 node_of(const Engine *e, u32 pe, u32 kind, u32 colour) {
    const Pe *p = e->pes + pe;
    if (kind == NODE_ROUTER) return p->first_node + below(p->routers, colour);
    u32 outputs = p->first_node + (u32)__builtin_popcount(p->routers);
    if (kind == NODE_OUTPUT) return outputs + below(p->outputs, colour);
    return outputs + (u32)__builtin_popcount(p->outputs) + below(p->inputs, colour);
}

static u32 neighbour(const Engine *e, u32 pe, int direction) {
    switch (direction) {
    case NORTH: return pe - (u32)e->width;
    case EAST: return pe + 1;
    case SOUTH: return pe + (u32)e->width;
    default: return pe - 1;
    }
}

/* The node that `links` bit `direction` of `node` leads to. */
static u32 target_of(const Engine *e, const Node *node, int direction) {
    if (direction == RAMP_IN) return node_of(e, node->pe, NODE_ROUTER, node->colour);
    if (direction == RAMP) return node_of(e, node->pe, NODE_INPUT, node->colour);
    return node_of(e, neighbour(e, node->pe, direction), NODE_ROUTER, node->colour);
}

static i32 occupied_at(const Node *node, i32 t) {
    return node->occupied + (t - node->reference) * ((i32)node->fed - (i32)node->firing);
}

/* Make cycle t the reference of the occupancy, before a rate changes. */
void settle(Node *node, i32 t) {
    node->occupied = (i16)occupied_at(node, t);
    node->reference = t;
}

Stream *new_stream(Engine *e, u32 size) {
    Stream *stream = malloc(sizeof(Stream) + 4 * (size_t)size);
    if (!stream) {
        fail(e, FAULT_NO_MEMORY, 0, e->now, 0);
        exit(70); /* nothing can go on without memory; the fault is for debuggers */
    }
    stream->refs = 1;
    stream->size = size;
    stream->control = 0;
    return stream;
}

/* Streams cross from band to band, so their counts are atomic. */
void retain(Stream *stream) { __atomic_fetch_add(&stream->refs, 1, __ATOMIC_RELAXED); }

void release(Stream *stream) {
    if (stream && __atomic_sub_fetch(&stream->refs, 1, __ATOMIC_ACQ_REL) == 0) free(stream);
}

static u32 new_run(Engine *e) {
    u32 index = e->free_run;
    if (index != NIL) {
        e->free_run = e->runs[index].next;
        return index;
    }
    e->runs = grow(e, e->runs, &e->room_runs, e->num_runs + 1, sizeof(Run));
    return e->num_runs++;
}

void pop_run(Engine *e, Node *node) {
    u32 index = node->head;
    Run *run = e->runs + index;
    node->head = run->next;
    if (node->head == NIL) node->tail = NIL;
    node->taken = 0;
    release(run->stream);
    run->next = e->free_run;
    e->free_run = index;
}

static u32 drainer(u32 id, const Node *node) {
    return node->kind == NODE_INPUT ? ID_OPERATION | node->operation : id;
}

static int position_at(const Engine *e, Node *node, i32 t) {
    if (node->advance_at && t >= node->advance_at) {
        const Route *route = e->routes + node->route;
        if (node->position + 1u < route->num_positions) node->position++;
        else if (route->ring) node->position = 0;
        node->advance_at = 0;
    }
    return node->position;
}

static int side_of(int direction) { return direction >= RAMP ? RAMP : (direction + 2) % 4; }

/* Room in the target, and its switch takes words from this side; otherwise see to it that `id` is woken. */
static int target_free(Engine *e, u32 id, Node *target, int side, i32 t) {
    if (target->kind == NODE_ROUTER) {
        const Route *route = e->routes + target->route;
        if (!(route->inputs[position_at(e, target, t)] >> side & 1)) {
            if (target->advance_at) schedule(e, id, t + 1);
            target->blocked |= (u8)(1 << side);
            return 0;
        }
    }
    i32 room = target->capacity - occupied_at(target, t);
    if (room > 0) return 1;
    if (target->firing || target->advance_at) schedule(e, id, t + 1);
    target->blocked |= (u8)(1 << side);
    return 0;
}

static int targets_free(Engine *e, u32 id, const Node *node, u8 links, i32 t) {
    for (u32 rest = links; rest; rest &= rest - 1) {
        int direction = __builtin_ctz(rest);
        if (!target_free(e, id, e->nodes + target_of(e, node, direction), side_of(direction), t)) return 0;
    }
    return 1;
}

/* When a target that nobody drains will be full. */
static void schedule_full(Engine *e, u32 feeder, const Node *target, i32 t) {
    if (!target->firing) schedule(e, feeder, t + target->capacity - occupied_at(target, t));
}

static void feed_open(Engine *e, u32 index, u32 feeder, Stream *stream, u32 offset, i32 arrives, i32 t) {
    Node *node = e->nodes + index;
    e = owner(e, node->pe);
    if (node->fed) {
        fail(e, FAULT_COLLISION, node->pe, t, node->colour);
        return;
    }
    settle(node, t);
    node->fed = 1;
    node->feeder = feeder;
    u32 run = new_run(e);
    retain(stream);
    e->runs[run] = (Run){stream, offset, NIL, arrives, OPEN};
    int woken = 0; /* the drainer will be evaluated when the run arrives, and schedules the fill if it cannot start */
    if (node->head == NIL) {
        node->head = run;
        node->taken = 0;
        woken = arrives < t + node->capacity - occupied_at(node, t);
        if (node->kind != NODE_INPUT) schedule(e, index, arrives);
        else {
            if (node->operation != NIL) schedule(e, ID_OPERATION | node->operation, arrives);
            else woken = 0;
            if (node->has_task) schedule(e, ID_PE | node->pe, arrives);
        }
    } else
        e->runs[node->tail].next = run;
    node->tail = run;
    if (!woken) schedule_full(e, feeder, node, t);
}

static void feed_close(Engine *e, u32 index, i32 count, i32 t) {
    Node *node = e->nodes + index;
    e = owner(e, node->pe);
    settle(node, t);
    node->fed = 0;
    Run *run = e->runs + node->tail;
    run->count = count;
    if (node->head != node->tail) return;
    if (node->firing) {
        i32 end = node->fire_start + count - node->taken;
        /* An instruction that ends by itself then is evaluated anyway. */
        int known = node->kind == NODE_INPUT && node->fire_start + e->operations[node->operation].remaining <= end;
        if (!known) schedule(e, drainer(index, node), end);
    }
    else if (node->taken == count) pop_run(e, node);
}

void wake_feeders(Engine *e, Node *node, i32 time) {
    u32 blocked = node->blocked;
    node->blocked = 0;
    for (; blocked; blocked &= blocked - 1) {
        int side = __builtin_ctz(blocked);
        if (node->kind == NODE_OUTPUT) {
            if (node->operation != NIL) schedule(e, ID_OPERATION | node->operation, time);
        } else if (node->kind == NODE_INPUT) schedule(e, node_of(e, node->pe, NODE_ROUTER, node->colour), time);
        else if (side == RAMP) schedule(e, node_of(e, node->pe, NODE_OUTPUT, node->colour), time);
        else schedule(e, node_of(e, neighbour(e, node->pe, side), NODE_ROUTER, node->colour), time);
    }
}

static void add_starter(Engine *e, u32 id) {
    if (!(id & ID_KIND) && e->nodes[id].border) {
        const Node *node = e->nodes + id;
        e->border_starters =
            grow(e, e->border_starters, &e->room_border_starters, e->num_border_starters + 1, sizeof(Candidate));
        i32 since = node->waits_since >= 0 ? node->waits_since : e->now;
        e->border_starters[e->num_border_starters++] = (Candidate){since, node->colour, id};
        return;
    }
    if (!(id & ID_KIND) && e->nodes[id].shared) {
        const Node *node = e->nodes + id;
        e->candidates = grow(e, e->candidates, &e->room_candidates, e->num_candidates + 1, sizeof(Candidate));
        i32 since = node->waits_since >= 0 ? node->waits_since : e->now;
        e->candidates[e->num_candidates++] = (Candidate){since, node->colour, id};
        return;
    }
    e->starters = grow(e, e->starters, &e->room_starters, e->num_starters + 1, sizeof(u32));
    e->starters[e->num_starters++] = id;
}

/* -- queues of routers and outputs ------------------------------------------------------------------------------- */

static u8 wanted_links(const Engine *e, Node *node, i32 t) {
    if (node->kind == NODE_OUTPUT) return 1 << RAMP_IN;
    u8 links = e->routes[node->route].outputs[position_at(e, node, t)];
    return e->runs[node->head].stream->control ? (u8)(links & ~(1 << RAMP)) : links;
}

static i32 latency(const Engine *e, int direction) { return direction >= RAMP ? e->costs.ramp_cycles : e->costs.hop_cycles; }

/* The head run begins to flow to all targets in cycle t. */
static void begin_run(Engine *e, u32 id, Node *node, i32 t) {
    Run run = e->runs[node->head];
    node->fire_start = t;
    for (u32 rest = node->links; rest; rest &= rest - 1) {
        int direction = __builtin_ctz(rest);
        u32 target = target_of(e, node, direction);
        feed_open(e, target, id, run.stream, run.offset + (u32)node->taken, t + latency(e, direction), t);
    }
    if (run.count != OPEN) schedule(e, id, t + run.count - node->taken);
    if (run.stream->control && node->kind == NODE_ROUTER) {
        node->advance_at = t + 1;
        wake_feeders(e, node, t + 1);
        if (node->fed) schedule(e, node->feeder, t + 1);
    }
}

static void end_run(Engine *e, Node *node, i32 t) {
    i32 fired = t - node->fire_start;
    for (u32 rest = node->links; rest; rest &= rest - 1)
        feed_close(e, target_of(e, node, __builtin_ctz(rest)), fired, t);
    node->fired += (u32)fired;
    if (node->kind == NODE_ROUTER) {
        e->link_words += (i64)fired * __builtin_popcount(node->links & 15);
        e->pes[node->pe].hops += (u32)fired;
    }
}

static void stop_node(Engine *e, u32 id, Node *node, i32 t) {
    Pe *p = e->pes + node->pe;
    end_run(e, node, t);
    settle(node, t);
    node->firing = 0;
    p->links &= (u8)~node->links;
    if (node->fed) schedule(e, node->feeder, t + node->capacity - occupied_at(node, t));
    if (t - 1 > e->last_event) e->last_event = t - 1;
    add_starter(e, id);
    if (!node->shared) return;
    u32 *waiting = node->kind == NODE_ROUTER ? &p->waiting_routers : &p->waiting_outputs;
    for (; *waiting; *waiting &= *waiting - 1)
        add_starter(e, node_of(e, node->pe, node->kind, (u32)__builtin_ctz(*waiting)));
}

static void continue_node(Engine *e, u32 id, i32 t) {
    Node *node = e->nodes + id;
    const Run *run = e->runs + node->head;
    i32 taken = node->taken + t - node->fire_start;
    if (run->count != OPEN && taken == run->count) {
        pop_run(e, node);
        if (node->head != NIL && e->runs[node->head].arrives <= t && wanted_links(e, node, t) == node->links &&
            targets_free(e, id, node, node->links, t)) {
            end_run(e, node, t);
            begin_run(e, id, node, t);
            return;
        }
        stop_node(e, id, node, t);
    } else if (wanted_links(e, node, t) != node->links || !targets_free(e, id, node, node->links, t)) {
        stop_node(e, id, node, t);
        node->taken = taken;
    } else
        for (u32 rest = node->links; rest; rest &= rest - 1)
            schedule_full(e, id, e->nodes + target_of(e, node, __builtin_ctz(rest)), t);
}

/* The node cannot start: its feeder, if it has one, will find it full. */
static void schedule_fill(Engine *e, const Node *node, i32 t) {
    i32 room = node->capacity - occupied_at(node, t);
    if (node->fed && room > 0) schedule(e, node->feeder, t + room);
}

static void wait_here(Engine *e, Node *node, u8 cause, i32 t) {
    if (node->waits_since < 0) node->waits_since = t;
    node->cause = cause;
    schedule_fill(e, node, t);
}

static void start_node(Engine *e, u32 id, i32 t) {
    Node *node = e->nodes + id;
    if (node->firing || node->head == NIL) return;
    i32 arrives = e->runs[node->head].arrives + node->taken;
    if (arrives > t) {
        schedule(e, id, arrives);
        return;
    }
    Pe *p = e->pes + node->pe;
    u8 links = wanted_links(e, node, t);
    if (p->links & links) {
        u32 *waiting = node->kind == NODE_ROUTER ? &p->waiting_routers : &p->waiting_outputs;
        *waiting |= 1u << node->colour;
        wait_here(e, node, WAIT_LINK, t);
        return;
    }
    if (!targets_free(e, id, node, links, t)) {
        wait_here(e, node, WAIT_ROOM, t);
        return;
    }
    if (node->waits_since >= 0) e->stalls[node->cause] += t - node->waits_since;
    node->waits_since = -1;
    settle(node, t);
    node->firing = 1;
    node->links = links;
    p->links |= links;
    wake_feeders(e, node, t + 1);
    begin_run(e, id, node, t);
}

/* By the core itself, after the routers have moved in cycle t. */
void advance_switch(Engine *e, u32 index, i32 t) {
    Node *node = e->nodes + index;
    position_at(e, node, t);
    if (node->advance_at) position_at(e, node, node->advance_at);
    node->advance_at = t + 1;
    wake_feeders(e, node, t + 1);
    if (node->fed) schedule(e, node->feeder, t + 1);
    schedule(e, index, t + 1);
}

/* -- fabric instructions ------------------------------------------------------------------------------------------ */

static void add_piece(Engine *e, Operation *op, Run piece) {
    op->pieces = grow(e, op->pieces, &op->room_pieces, op->num_pieces + 1, sizeof(Run));
    retain(piece.stream);
    piece.count = 0;
    op->pieces[op->num_pieces++] = piece;
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
        node->fired += (u32)fired;
        if (op->output == NIL) op->pieces[op->num_pieces - 1].count = fired;
        const Run *run = e->runs + node->head;
        if (run->count != OPEN && run->count == node->taken) pop_run(e, node);
    }
    if (op->output != NIL) feed_close(e, op->output, fired, t);
}

static void stop_operation(Engine *e, u32 id, Operation *op, i32 t) {
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
        add_starter(e, id);
        return;
    }
    op->done_at = t;
    e->ready_pes = grow(e, e->ready_pes, &e->room_ready, e->num_ready + 1, sizeof(u32));
    e->ready_pes[e->num_ready++] = op->pe;
}

static void continue_operation(Engine *e, u32 id, i32 t) {
    Operation *op = e->operations + (id & ID_INDEX);
    i32 fired = t - op->fire_start;
    if (op->remaining == fired || (op->output != NIL && !target_free(e, id, e->nodes + op->output, RAMP, t))) {
        stop_operation(e, id, op, t);
        return;
    }
    if (op->input != NIL) {
        Node *node = e->nodes + op->input;
        const Run *run = e->runs + node->head;
        if (run->count != OPEN && node->taken + fired == run->count) {
            if (run->next == NIL || e->runs[run->next].arrives > t) {
                stop_operation(e, id, op, t);
            } else {
                end_operation(e, op, t);
                begin_operation(e, id, op, t);
            }
            return;
        }
    }
    if (op->output != NIL) schedule_full(e, id, e->nodes + op->output, t);
}

static void start_operation(Engine *e, u32 id, i32 t) {
    Operation *op = e->operations + (id & ID_INDEX);
    if (op->firing || op->remaining == 0 || op->pe == NIL) return;
    Node *input = op->input == NIL ? NULL : e->nodes + op->input;
    if (t < op->start) { /* woken by a word that arrived early */
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
        if (op->waits_since < 0) op->waits_since = t;
        op->cause = cause;
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

/* -- one cycle ---------------------------------------------------------------------------------------------------- */

static int by_turn(const void *left, const void *right) {
    const Candidate *a = left, *b = right;
    if (a->since != b->since) return a->since < b->since ? -1 : 1;
    if (a->colour != b->colour) return a->colour < b->colour ? -1 : 1;
    return a->id < b->id ? -1 : a->id > b->id;
}

/* First half of a cycle: movers that fire and cannot go on stop; the others are remembered as starters. */
void stop_movers(Engine *e, const u32 *ids, u32 count, i32 t) {
    e->num_starters = e->num_candidates = e->num_border = e->num_border_starters = 0;
    for (u32 i = 0; i < count && !e->fault; i++) {
        u32 id = ids[i];
        if ((id & ID_KIND) == ID_PE) {
            e->ready_pes = grow(e, e->ready_pes, &e->room_ready, e->num_ready + 1, sizeof(u32));
            e->ready_pes[e->num_ready++] = id & ID_INDEX;
        } else if ((id & ID_KIND) == ID_OPERATION) {
            if (e->operations[id & ID_INDEX].firing) continue_operation(e, id, t);
            else add_starter(e, id);
        } else if (e->nodes[id].border) {
            e->border = grow(e, e->border, &e->room_border, e->num_border + 1, sizeof(u32));
            e->border[e->num_border++] = id;
        } else if (e->nodes[id].firing) continue_node(e, id, t);
        else add_starter(e, id);
    }
}

void stop_border(Engine *e, i32 t) {
    for (u32 i = 0; i < e->num_border && !e->fault; i++) {
        u32 id = e->border[i];
        if (e->nodes[id].firing) continue_node(e, id, t);
        else add_starter(e, id);
    }
}

static void start_in_turn(Engine *e, Candidate *candidates, u32 count, i32 t) {
    if (count > 1) qsort(candidates, count, sizeof(Candidate), by_turn);
    for (u32 i = 0; i < count && !e->fault; i++) start_node(e, candidates[i].id, t);
}

/* Second half: whoever can, starts; those that share links in the order of their turn. */
void start_movers(Engine *e, i32 t) {
    for (u32 i = 0; i < e->num_starters && !e->fault; i++) {
        u32 id = e->starters[i];
        if (id & ID_OPERATION) start_operation(e, id, t);
        else start_node(e, id, t);
    }
    start_in_turn(e, e->candidates, e->num_candidates, t);
}

void start_border(Engine *e, i32 t) { start_in_turn(e, e->border_starters, e->num_border_starters, t); }
