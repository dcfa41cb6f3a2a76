/* Queues: how full they are over time, the runs of words in them, who feeds and who drains them. */
#include "engine.h"

static u32 below(u32 mask, u32 colour) { return (u32)__builtin_popcount(mask & ((1u << colour) - 1)); }

u32 node_of(const Engine *e, u32 pe, u32 kind, u32 colour) {
    const Site *p = e->sites + pe;
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
u32 target_of(const Engine *e, const Node *node, int direction) {
    if (direction == RAMP_IN) return node_of(e, node->pe, NODE_ROUTER, node->colour);
    if (direction == RAMP) return node_of(e, node->pe, NODE_INPUT, node->colour);
    return node_of(e, neighbour(e, node->pe, direction), NODE_ROUTER, node->colour);
}

i32 occupied_at(const Node *node, i32 t) {
    return node->occupied + (t - node->reference) * ((i32)node->fed - (i32)node->firing);
}

/* Make cycle t the reference of the occupancy, before a rate changes. */
void settle(Node *node, i32 t) {
    node->occupied = (i16)occupied_at(node, t);
    node->reference = t;
}

static u32 new_run(Engine *e) {
    u32 index = e->free_run;
    if (index != NIL) {
        e->free_run = e->runs[index].next;
        ask_record(e->runs + e->free_run, sizeof(Run)); /* for the next one */
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

int position_at(const Engine *e, Node *node, i32 t) {
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
int target_free(Engine *e, u32 id, Node *target, int side, i32 t) {
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
    if (target->firing || (target->kind == NODE_ROUTER && target->advance_at)) schedule(e, id, t + 1);
    target->blocked |= (u8)(1 << side);
    return 0;
}

int targets_free(Engine *e, u32 id, const Node *node, u8 links, i32 t) {
    for (u32 rest = links; rest; rest &= rest - 1) {
        int direction = __builtin_ctz(rest);
        if (!target_free(e, id, e->nodes + target_of(e, node, direction), side_of(direction), t)) return 0;
    }
    return 1;
}

/* When a target that nobody drains will be full. */
void schedule_full(Engine *e, u32 feeder, const Node *target, i32 t) {
    if (!target->firing) schedule(e, feeder, t + target->capacity - occupied_at(target, t));
}

/* Words that follow the last ones of a queue in the same stream lengthen their run, if that cannot be told from a run
 * of their own: taken one per cycle from now on, none of the words before them is reached before its new time of
 * arrival. Without this a stream that was held up once stays in pieces all along its way, and each costs events. */
static int extend_run(Engine *e, Node *node, const Stream *stream, u32 offset, i32 arrives, i32 t) {
    if (node->tail == NIL) return 0;
    Run *run = e->runs + node->tail;
    if (run->stream != stream || run->offset + (u32)run->count != offset) return 0;
    i32 taken = node->head != node->tail ? 0 : node->taken + (node->firing ? t - node->fire_start : 0);
    if (arrives - (run->count - taken) > t) return 0;
    run->arrives = arrives - run->count;
    node->joined = run->count;
    run->count = OPEN;
    return 1;
}

void feed_open(Engine *e, u32 index, u32 feeder, Stream *stream, u32 offset, i32 arrives, i32 t) {
    Node *node = e->nodes + index;
    e = owner(e, index);
    if (node->fed) {
        fail(e, FAULT_COLLISION, node->pe, t, node->colour);
        return;
    }
    settle(node, t);
    node->fed = 1;
    node->feeder = feeder;
    node->joined = 0;
    if (extend_run(e, node, stream, offset, arrives, t)) {
        schedule_full(e, feeder, node, t);
        return;
    }
    u32 run = new_run(e);
    retain(stream);
    e->runs[run] = (Run){stream, offset, NIL, arrives, OPEN};
    int woken = 0; /* the drainer will be evaluated when the run arrives, and schedules the fill if it cannot start */
    if (node->head == NIL) {
        node->head = node->tail = run;
        node->taken = 0;
        if (receive_at(e, node, arrives, t)) return;
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

void feed_close(Engine *e, u32 index, i32 count, i32 t) {
    Node *node = e->nodes + index;
    e = owner(e, index);
    settle(node, t);
    node->fed = 0;
    Run *run = e->runs + node->tail;
    count += node->joined;
    run->count = count;
    if (node->head != node->tail) return;
    if (node->firing) {
        i32 end = node->fire_start + count - node->taken;
        /* An instruction that ends by itself then is evaluated anyway. */
        int known = node->kind == NODE_INPUT && node->drained_at <= end;
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

void add_starter(Engine *e, u32 id) {
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
        if (node->waits_since < 0) {
            Ids *fresh = e->fresh + node->colour;
            fresh->ids = grow(e, fresh->ids, &fresh->room, fresh->count + 1, sizeof(u32));
            fresh->ids[fresh->count++] = id;
            return;
        }
        e->candidates = grow(e, e->candidates, &e->room_candidates, e->num_candidates + 1, sizeof(Candidate));
        e->candidates[e->num_candidates++] = (Candidate){node->waits_since, node->colour, id};
        return;
    }
    e->starters = grow(e, e->starters, &e->room_starters, e->num_starters + 1, sizeof(u32));
    e->starters[e->num_starters++] = id;
}

/* The node cannot start: its feeder, if it has one, will find it full. */
void schedule_fill(Engine *e, const Node *node, i32 t) {
    i32 room = node->capacity - occupied_at(node, t);
    if (node->fed && room > 0) schedule(e, node->feeder, t + room);
}
