/* Movers: when routers and output queues start and stop moving words, and the two halves of a cycle. The rules are
 * those of reference.py. */
#include "engine.h"
#include <stdlib.h>

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
        /* The other thread must find words that depend on nothing of this band; now it waits. */
        if (node->border && owner(e, id) != owner(e, target)) keep_words(e, run.stream);
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
    if (node->kind == NODE_ROUTER) {
        e->link_words += (i64)fired * __builtin_popcount(node->links & 15);
        e->sites[node->pe].hops += (u32)fired;
    }
}

static void stop_node(Engine *e, u32 id, Node *node, int may_start, i32 t) {
    Site *p = e->sites + node->pe;
    end_run(e, node, t);
    settle(node, t);
    node->firing = 0;
    p->links &= ~(u32)node->links;
    if (node->fed) schedule(e, node->feeder, t + node->capacity - occupied_at(node, t));
    if (t - 1 > e->last_event) e->last_event = t - 1;
    if (may_start && node->head != NIL) add_starter(e, id);
    if (!node->shared) return;
    u32 *waiting = node->kind == NODE_ROUTER ? &p->waiting_routers : &p->waiting_outputs;
    for (; *waiting; *waiting &= *waiting - 1)
        add_starter(e, node_of(e, node->pe, node->kind, (u32)__builtin_ctz(*waiting)));
}

/* It has words, but a target is full, and would be found full again in this cycle. */
static void hold_up(Engine *e, u32 id, Node *node, i32 t) {
    stop_node(e, id, node, 0, t);
    node->waits_since = t;
    node->cause = WAIT_ROOM;
}

static void continue_node(Engine *e, u32 id, i32 t) {
    Node *node = e->nodes + id;
    const Run *run = e->runs + node->head;
    i32 taken = node->taken + t - node->fire_start;
    if (run->count != OPEN && taken == run->count) {
        pop_run(e, node);
        if (node->head == NIL || e->runs[node->head].arrives > t || wanted_links(e, node, t) != node->links)
            stop_node(e, id, node, 1, t);
        else if (targets_free(e, id, node, node->links, t)) {
            end_run(e, node, t);
            begin_run(e, id, node, t);
        } else
            hold_up(e, id, node, t);
    } else if (wanted_links(e, node, t) != node->links) {
        stop_node(e, id, node, 1, t);
        node->taken = taken;
    } else if (!targets_free(e, id, node, node->links, t)) {
        hold_up(e, id, node, t);
        node->taken = taken;
    } else
        for (u32 rest = node->links; rest; rest &= rest - 1)
            schedule_full(e, id, e->nodes + target_of(e, node, __builtin_ctz(rest)), t);
}

static void wait_here(Engine *e, Node *node, u8 cause, i32 t) {
    if (node->waits_since < 0) node->waits_since = t, node->cause = cause;
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
    Site *p = e->sites + node->pe;
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

/* -- one cycle ---------------------------------------------------------------------------------------------------- */

static int by_turn(const void *left, const void *right) {
    const Candidate *a = left, *b = right;
    if (a->since != b->since) return a->since < b->since ? -1 : 1;
    if (a->colour != b->colour) return a->colour < b->colour ? -1 : 1;
    return a->id < b->id ? -1 : a->id > b->id;
}

/* First half of a cycle: movers that fire and cannot go on stop; the others are remembered as starters. */
void stop_movers(Engine *e, i32 t) {
    e->num_starters = e->num_candidates = e->num_border = e->num_border_starters = 0;
    for (u32 colour = 0; colour < MAX_COLOURS; colour++) e->fresh[colour].count = 0;
    for (u32 i = 0; i < e->num_present && !e->fault; i++) {
        u32 id = e->present[i];
        look_ahead(e, e->present, e->num_present, i);
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

/* Those that have waited, in the order of their turn; then those that begin to wait now, colour by colour. Order only
 * matters among the colours of one router, so there is nothing more to sort. */
static void start_candidates(Engine *e, i32 t) {
    start_in_turn(e, e->candidates, e->num_candidates, t);
    for (u32 colour = 0; colour < MAX_COLOURS; colour++) {
        const Ids *fresh = e->fresh + colour;
        for (u32 i = 0; i < fresh->count && !e->fault; i++) {
            look_ahead(e, fresh->ids, fresh->count, i);
            start_node(e, fresh->ids[i], t);
        }
    }
}

/* Second half: whoever can, starts; those that share links in the order of their turn. */
void start_movers(Engine *e, i32 t) {
    for (u32 i = 0; i < e->num_starters && !e->fault; i++) {
        u32 id = e->starters[i];
        look_ahead(e, e->starters, e->num_starters, i);
        if (id & ID_OPERATION) start_operation(e, id, t);
        else start_node(e, id, t);
    }
    start_candidates(e, t);
}

void start_border(Engine *e, i32 t) { start_in_turn(e, e->border_starters, e->num_border_starters, t); }
