/* Looking ahead: the events of a cycle are scattered over a mesh that no cache holds, so what the next ones will touch
 * is asked for while this one is worked on, one pointer further at every stage. Nothing here changes any state. */
#include "engine.h"

enum { FIRST = 32, SECOND = 24, THIRD = 16, FOURTH = 8 }; /* events ahead */
enum { MAX_ASKED = 1024, MAX_QUEUES = 6 };                /* bytes of a tile product's operands; instructions */

/* The empty assembly keeps the compiler from taking functions that only ask for functions that do nothing. */
static void ask(const void *address) {
    __builtin_prefetch(address, 1);
    __asm__ volatile("");
}

void ask_record(const void *address, size_t size) {
    for (size_t at = 0; at < size; at += 64) ask((const char *)address + at);
}

static u32 links_of(const Engine *e, const Node *node) {
    if (node->firing) return node->links;
    return node->kind == NODE_OUTPUT ? 1u << RAMP_IN : e->routes[node->route].outputs[node->position];
}

static void ask_sites(const Engine *e, const Node *node) {
    const Site *site = e->sites + node->pe;
    u32 links = node->kind == NODE_ROUTER ? links_of(e, node) : 0;
    ask(site);
    if (links >> NORTH & 1) ask(site - e->width);
    if (links >> SOUTH & 1) ask(site + e->width);
    if (links >> EAST & 1) ask(site + 1);
    if (links >> WEST & 1) ask(site - 1);
}

/* How a node's targets change when it starts (their instruction takes the words) or stops (their last run ends). */
static void ask_beyond(const Engine *e, const Node *node) {
    for (u32 links = links_of(e, node); links; links &= links - 1) {
        const Node *target = e->nodes + target_of(e, node, __builtin_ctz(links));
        if (node->firing && target->tail != NIL) ask(e->runs + target->tail);
        else if (!node->firing && target->kind == NODE_INPUT && target->operation != NIL)
            ask_record(e->operations + target->operation, sizeof(Operation));
    }
}

static void look_at_node(const Engine *e, const Node *node, int stage) {
    if (stage == FIRST) ask(node);
    else if (node->head == NIL) return;
    else if (stage == SECOND) {
        ask(e->runs + node->head);
        ask_sites(e, node);
    } else if (stage == THIRD) {
        ask(e->runs[node->head].stream);
        for (u32 links = links_of(e, node); links; links &= links - 1)
            ask(e->nodes + target_of(e, node, __builtin_ctz(links)));
    } else
        ask_beyond(e, node);
}

static void look_at_operation(const Engine *e, const Operation *op, int stage) {
    if (stage == FIRST) ask_record(op, sizeof(Operation));
    else if (stage == SECOND) {
        if (op->input != NIL) ask(e->nodes + op->input);
        if (op->output != NIL) ask(e->nodes + op->output);
        if (op->pe != NIL) ask_record(e->pes + op->pe, sizeof(Pe));
    } else if (stage == THIRD) {
        if (op->input != NIL && e->nodes[op->input].head != NIL) ask(e->runs + e->nodes[op->input].head);
        if (op->output != NIL && e->nodes[op->output].tail != NIL) ask(e->runs + e->nodes[op->output].tail);
    }
}

static void look_at(const Engine *e, u32 id, int stage) {
    if (!(id & ID_KIND)) look_at_node(e, e->nodes + id, stage);
    else if ((id & ID_KIND) == ID_OPERATION) look_at_operation(e, e->operations + (id & ID_INDEX), stage);
}

void look_ahead(const Engine *e, const u32 *ids, u32 count, u32 i) {
    if (i + FIRST < count) look_at(e, ids[i + FIRST], FIRST);
    if (i + SECOND < count) look_at(e, ids[i + SECOND], SECOND);
    if (i + THIRD < count) look_at(e, ids[i + THIRD], THIRD);
    if (i + FOURTH < count) look_at(e, ids[i + FOURTH], FOURTH);
}

/* What it will complete: the queues, and from where to where words are copied. */
static void ask_receives(Engine *e, u32 pe, int stage) {
    const Pe *p = e->pes + pe;
    for (u32 rest = p->finished & p->receiving; rest; rest &= rest - 1) {
        const Operation *op = e->operations + p->threads[__builtin_ctz(rest)];
        const Stream *stream = op->piece.stream;
        size_t size = (size_t)(op->high - op->low);
        if (stage == THIRD) {
            ask(stream);
            ask(e->nodes + op->input);
            ask_record(memory_of(e, pe, op->low), size);
        } else if (stream && stream->kind == STREAM_MEMORY)
            ask_record(stream->memory + (size_t)stream->bytes * op->piece.offset, size);
    }
}

/* The tile product that it may come to. */
static void ask_tile(Engine *e, u32 pe) {
    const Pe *p = e->pes + pe;
    const Program *program = e->programs + p->program;
    if (p->pc < 0 || program->next_tile[p->pc] < 0) return;
    const i32 *row = program->code + (size_t)program->next_tile[p->pc] * INSTRUCTION_WORDS;
    size_t size = type_bytes(row[F_DTYPE]), m = (size_t)row[F_LENGTH], n = (size_t)row[F_N], k = (size_t)row[F_K];
    if (row[F_LENGTH_REG] >= 0 || size * (m * k + k * n + m * n) > MAX_ASKED) return;
    ask_record(memory_of(e, pe, row[F_A + 1]), size * m * k);
    ask_record(memory_of(e, pe, row[F_B + 1]), size * k * n);
    ask_record(memory_of(e, pe, row[F_DST + 1]), size * m * n);
}

/* The queues of fabric instructions that come next. */
static void ask_queues(Engine *e, u32 pe) {
    const Pe *p = e->pes + pe;
    const Program *program = e->programs + p->program;
    i32 last = p->pc + MAX_QUEUES < program->num_instructions ? p->pc + MAX_QUEUES : program->num_instructions;
    for (i32 pc = p->pc; pc >= 0 && pc < last; pc++) {
        const i32 *row = program->code + (size_t)pc * INSTRUCTION_WORDS;
        if (row[F_DST] == KIND_FABRIC) ask(e->nodes + node_of(e, pe, NODE_OUTPUT, (u32)row[F_DST + 1]));
        if (row[F_A] == KIND_FABRIC) ask(e->nodes + node_of(e, pe, NODE_INPUT, (u32)row[F_A + 1]));
        if (row[F_B] == KIND_FABRIC) ask(e->nodes + node_of(e, pe, NODE_INPUT, (u32)row[F_B + 1]));
    }
}

void look_ahead_pe(Engine *e, const u32 *pes, u32 count, u32 i) {
    if (i + FIRST < count) ask_record(e->pes + pes[i + FIRST], sizeof(Pe));
    if (i + SECOND < count) {
        u32 pe = pes[i + SECOND];
        const Pe *p = e->pes + pe;
        for (u32 rest = p->finished; rest; rest &= rest - 1)
            ask_record(e->operations + p->threads[__builtin_ctz(rest)], sizeof(Operation));
        if (p->ready_at == e->now) {
            ask(e->sites + pe);
            ask_record(registers_of(e, pe), 128);
            ask_tile(e, pe);
        }
    }
    if (i + THIRD < count) {
        if (e->pes[pes[i + THIRD]].ready_at == e->now) ask_queues(e, pes[i + THIRD]);
        ask_receives(e, pes[i + THIRD], THIRD);
    }
    if (i + FOURTH < count) ask_receives(e, pes[i + FOURTH], FOURTH);
}
