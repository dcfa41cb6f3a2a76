/* Looking ahead: the events of a cycle are scattered over a mesh that no cache holds, so what the next ones will touch
 * is asked for while this one is worked on. Nothing here changes any state. */
#include "engine.h"

enum { FAR = 24, MIDDLE = 16, CLOSE = 8 }; /* events ahead: their own records, what those point to, and what that needs */

static void ask(const void *address) { __builtin_prefetch(address, 1); }

static void ask_first(const Engine *e, u32 id) {
    if (!(id & ID_KIND)) ask(e->nodes + id);
    else if ((id & ID_KIND) == ID_OPERATION) {
        const char *operation = (const char *)(e->operations + (id & ID_INDEX));
        ask(operation);
        ask(operation + 64);
    }
}

static void ask_second(const Engine *e, u32 id) {
    if (!(id & ID_KIND)) {
        const Node *node = e->nodes + id;
        if (node->head == NIL) return;
        ask(e->runs + node->head);
        ask(e->sites + node->pe);
    } else if ((id & ID_KIND) == ID_OPERATION) {
        const Operation *op = e->operations + (id & ID_INDEX);
        if (op->input != NIL) ask(e->nodes + op->input);
        if (op->output != NIL) ask(e->nodes + op->output);
    }
}

static void ask_third(const Engine *e, u32 id) {
    if (!(id & ID_KIND)) {
        const Node *node = e->nodes + id;
        if (node->head == NIL) return;
        ask(e->runs[node->head].stream);
        u32 links = node->firing ? node->links : node->kind == NODE_OUTPUT ? 1u << RAMP_IN : e->routes[node->route].outputs[node->position];
        for (; links; links &= links - 1) ask(e->nodes + target_of(e, node, __builtin_ctz(links)));
    } else if ((id & ID_KIND) == ID_OPERATION) {
        const Operation *op = e->operations + (id & ID_INDEX);
        if (op->input == NIL || e->nodes[op->input].head == NIL) return;
        ask(e->runs + e->nodes[op->input].head);
    }
}

void look_ahead(const Engine *e, const u32 *ids, u32 count, u32 i) {
    if (i + FAR < count) ask_first(e, ids[i + FAR]);
    if (i + MIDDLE < count) ask_second(e, ids[i + MIDDLE]);
    if (i + CLOSE < count) ask_third(e, ids[i + CLOSE]);
}

static void ask_lines(const void *address, size_t size) {
    for (size_t at = 0; at < size; at += 64) ask((const char *)address + at);
}

static void ask_operations(const Engine *e, u32 pe) {
    const Pe *p = e->pes + pe;
    for (u32 rest = p->running; rest; rest &= rest - 1)
        ask_lines(e->operations + p->threads[__builtin_ctz(rest)], sizeof(Operation));
}

/* What its completed receives will write. */
static void ask_targets(Engine *e, u32 pe) {
    const Pe *p = e->pes + pe;
    for (u32 rest = p->finished & p->receiving; rest; rest &= rest - 1) {
        const Operation *op = e->operations + p->threads[__builtin_ctz(rest)];
        ask_lines(memory_of(e, pe, op->low), (size_t)(op->high - op->low));
        ask(op->piece.stream);
    }
}

void look_ahead_pe(Engine *e, const u32 *pes, u32 count, u32 i) {
    if (i + FAR < count) {
        ask_lines(e->pes + pes[i + FAR], sizeof(Pe));
        ask_lines(registers_of(e, pes[i + FAR]), 128);
    }
    if (i + MIDDLE < count) ask_operations(e, pes[i + MIDDLE]);
    if (i + CLOSE < count) ask_targets(e, pes[i + CLOSE]);
}
