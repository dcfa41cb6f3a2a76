/* The event loop, and the functions that engine.py calls. */
#include "engine.h"
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

/* Nothing can go on without memory; the fault is for debuggers. */
static void give_up(Engine *e) {
    fail(e, FAULT_NO_MEMORY, 0, e->now, 0);
    fputs("error: the simulator ran out of host memory: use fewer PEs or smaller arrays\n", stderr);
    exit(70);
}

/* Ask for large pages: with small ones nearly every event of a large mesh misses the TLB. A wish, not a need. */
static void *with_large_pages(void *items, size_t size) {
#if defined(MADV_HUGEPAGE)
    uintptr_t page = 1 << 21, first = ((uintptr_t)items + page - 1) & ~(page - 1);
    uintptr_t last = ((uintptr_t)items + size) & ~(page - 1);
    if (items && last > first) madvise((void *)first, last - first, MADV_HUGEPAGE);
#endif
    return items;
}

void *grow(Engine *e, void *items, u32 *room, u32 needed, size_t size) {
    if (needed <= *room) return items;
    u32 wanted = *room ? *room : 4;
    while (wanted < needed) wanted += wanted < 1u << 20 ? wanted : wanted / 4;
    void *bigger = realloc(items, wanted * size);
    if (!bigger) give_up(e);
    *room = wanted;
    return with_large_pages(bigger, wanted * size);
}

void *allocate(Engine *e, size_t size) {
    void *memory = malloc(size);
    if (!memory) give_up(e);
    return memory;
}

/* Words move before cores act, so a collision comes first; of several cores that fail in one cycle the first PE. */
void fail(Engine *e, i32 fault, u32 pe, i32 cycle, i32 detail) {
    int is_later = fault != FAULT_COLLISION && (u32)e->fault_pe <= pe;
    if (e->fault && (e->fault_cycle < cycle || e->fault == FAULT_COLLISION || is_later)) return;
    e->fault = fault;
    e->fault_pe = (i32)pe;
    e->fault_cycle = cycle;
    e->fault_detail = detail;
}

void add_span(Engine *e, u32 pe, i32 kind, i32 start, i32 end) {
    if (e->num_spans >= (u32)e->tracing) {
        e->num_lost_spans++;
        return;
    }
    e->spans = grow(e, e->spans, &e->room_spans, e->num_spans + 1, sizeof(Span));
    e->spans[e->num_spans++] = (Span){(i32)pe, kind, start, end};
}

/* -- one cycle, by one thread or by two ------------------------------------------------------------------------- */

typedef struct {
    Engine *bands[MAX_BANDS];
    u32 num_bands, arrived, phase;
    i32 until, max_cycles;
} Team;

static void barrier(Team *team) {
    if (team->num_bands == 1) return;
    u32 phase = __atomic_load_n(&team->phase, __ATOMIC_ACQUIRE);
    if (__atomic_add_fetch(&team->arrived, 1, __ATOMIC_ACQ_REL) == team->num_bands) {
        __atomic_store_n(&team->arrived, 0, __ATOMIC_RELAXED);
        __atomic_store_n(&team->phase, phase + 1, __ATOMIC_RELEASE);
        return;
    }
    for (u32 spins = 0; __atomic_load_n(&team->phase, __ATOMIC_ACQUIRE) == phase; spins++)
        if (spins > 2000) sched_yield(); /* the cores may be shared with others */
}

static u32 total(const Team *team, size_t field) {
    u32 sum = 0;
    for (u32 i = 0; i < team->num_bands; i++) sum += *(const u32 *)((const char *)team->bands[i] + field);
    return sum;
}

static void cycle(Engine *e, Team *team, i32 t) {
    int leads = e == team->bands[0];
    take_events(e, t);
    e->num_ready = 0;
    stop_movers(e, t);
    barrier(team);
    if (total(team, offsetof(Engine, num_border))) {
        if (leads) for (u32 i = 0; i < team->num_bands; i++) stop_border(team->bands[i], t);
        barrier(team);
    }
    start_movers(e, t);
    if (total(team, offsetof(Engine, num_border_starters))) {
        barrier(team);
        if (leads) for (u32 i = 0; i < team->num_bands; i++) start_border(team->bands[i], t);
        barrier(team);
    }
    for (u32 i = 0, failed = e->fault != 0; i < e->num_ready && !failed; i++) {
        look_ahead_pe(e, e->ready_pes, e->num_ready, i);
        step_pe(e, e->ready_pes[i], t);
    }
}

typedef struct {
    Team *team;
    Engine *band;
} Seat;

/* What every thread of a team does, in step with the others. */
static void *work(void *argument) {
    Team *team = ((Seat *)argument)->team;
    Engine *e = ((Seat *)argument)->band;
    for (;;) {
        e->next = next_event(e);
        barrier(team);
        i32 t = NEVER, fault = 0;
        for (u32 i = 0; i < team->num_bands; i++) {
            if (team->bands[i]->next < t) t = team->bands[i]->next;
            fault |= team->bands[i]->fault;
        }
        barrier(team); /* nobody goes on before all have looked */
        if (fault || t == NEVER || t > team->until || t > team->max_cycles) return NULL;
        cycle(e, team, t);
    }
}

/* The first instruction of the first PE: without words in its input queue it waits for them, else for room. */
static int check_deadlock(Engine *e) {
    for (i32 pe = 0; pe < e->num_pes; pe++) {
        const u32 *threads = e->pes[pe].threads;
        u32 thread = 0;
        while (thread < NUM_THREADS && threads[thread] == NIL) thread++;
        if (thread == NUM_THREADS) continue;
        if (e->fault) { /* another PE than that of the fault */
            if (!e->stuck.num_others++) e->stuck.other = pe;
            continue;
        }
        const Operation *op = owner_of_pe(e, (u32)pe)->operations + threads[thread];
        e->stuck.lacks_words = op->input != NIL && e->nodes[op->input].head == NIL;
        e->stuck.num_words = op->remaining;
        u32 node = e->stuck.lacks_words ? op->input : op->output;
        fail(e, FAULT_DEADLOCK, (u32)pe, e->last_event, e->nodes[node].colour);
    }
    return e->fault != 0;
}

static void check_end(Engine *e) {
    for (u32 i = 1; i < e->num_bands; i++)
        if (e->bands[i]->last_event > e->last_event) e->last_event = e->bands[i]->last_event;
    for (i32 pe = 0; pe < e->num_pes; pe++)
        if (e->pes[pe].last_event > e->last_event) e->last_event = e->pes[pe].last_event;
    if (check_deadlock(e)) return;
    const Node *first = NULL;
    for (u32 i = 0; i < e->num_nodes; i++) {
        const Node *node = e->nodes + i;
        if (node->head == NIL) continue;
        if (!first || node->pe < first->pe || (node->pe == first->pe && node->colour < first->colour)) first = node;
    }
    if (first) fail(e, FAULT_STRANDED, first->pe, e->last_event, first->colour);
}

/* Runs at most until cycle `until`; returns 1 while there is more to do. */
i32 engine_run(Engine *e, i32 until) {
    Team team = {.num_bands = e->num_bands, .until = until, .max_cycles = e->max_cycles};
    Seat seats[MAX_BANDS];
    pthread_t threads[MAX_BANDS];
    for (u32 i = 0; i < e->num_bands; i++) {
        team.bands[i] = e->bands[i];
        seats[i] = (Seat){&team, e->bands[i]};
    }
    for (u32 i = 1; i < e->num_bands; i++)
        if (pthread_create(threads + i, NULL, work, seats + i)) abort();
    work(seats);
    for (u32 i = 1; i < e->num_bands; i++) pthread_join(threads[i], NULL);
    i32 t = NEVER;
    for (u32 i = 0; i < e->num_bands; i++) {
        const Engine *band = e->bands[i];
        if (band->fault) fail(e, band->fault, (u32)band->fault_pe, band->fault_cycle, band->fault_detail);
        if (band->next < t) t = band->next;
    }
    if (e->fault) return 0;
    if (t == NEVER) check_end(e);
    else if (t > e->max_cycles) fail(e, FAULT_CYCLE_LIMIT, 0, e->max_cycles, 0);
    else return 1;
    return 0;
}

/* -- building -------------------------------------------------------------------------------------------------------- */

static void add_node(Engine *e, u32 pe, u32 kind, u32 colour, i32 capacity, i32 route) {
    Node *node = e->nodes + e->num_nodes++;
    *node = (Node){.pe = pe, .route = route < 0 ? 0 : (u32)route, .operation = NIL, .head = NIL, .tail = NIL,
                   .waits_since = -1, .capacity = (i16)capacity, .colour = (u8)colour, .kind = (u8)kind};
}

static u8 all_links(const Engine *e, const Node *node) {
    u8 links = 0;
    for (u32 i = 0; i < e->routes[node->route].num_positions; i++) links |= e->routes[node->route].outputs[i];
    return links;
}

static void mark_shared(Engine *e, const Site *p) {
    u32 routers = (u32)__builtin_popcount(p->routers), outputs = (u32)__builtin_popcount(p->outputs);
    Node *nodes = e->nodes + p->first_node;
    for (u32 i = 0; i < routers; i++)
        for (u32 j = 0; j < routers; j++)
            if (i != j && all_links(e, nodes + i) & all_links(e, nodes + j)) nodes[i].shared = 1;
    for (u32 i = 0; i < outputs; i++) nodes[routers + i].shared = outputs > 1;
}

static void add_pe(Engine *e, u32 pe, i32 program, i64 memory, const i16 *route_of, i32 num_colours) {
    Pe *p = e->pes + pe;
    Site *site = e->sites + pe;
    *site = (Site){.first_node = e->num_nodes};
    *p = (Pe){.memory = memory, .program = program, .pc = -1, .waits_for = NUM_THREADS};
    for (int i = 0; i < NUM_THREADS; i++) p->threads[i] = NIL;
    for (i32 colour = 0; colour < num_colours; colour++) {
        i32 route = route_of[(size_t)colour * (size_t)e->num_pes + pe];
        if (route < 0) continue;
        site->routers |= 1u << colour;
        add_node(e, pe, NODE_ROUTER, (u32)colour, e->costs.router_words, route);
    }
    if (program < 0) return;
    const Program *code = e->programs + program;
    for (i32 colour = 0; colour < num_colours; colour++)
        if (code->output_words[colour]) {
            site->outputs |= 1u << colour;
            add_node(e, pe, NODE_OUTPUT, (u32)colour,
                     code->output_words[colour] + e->costs.forward_latency - 1, -1);
        }
    for (i32 colour = 0; colour < num_colours; colour++)
        if (code->input_words[colour]) {
            site->inputs |= 1u << colour;
            add_node(e, pe, NODE_INPUT, (u32)colour, code->input_words[colour] + e->costs.ramp_cycles, -1);
        }
    for (i32 i = 0; i < code->num_tasks; i++) {
        if (code->tasks[4 * i + 3]) p->activated |= 1u << i;
        if (code->tasks[4 * i + 1] >= 0) e->nodes[node_of(e, pe, NODE_INPUT, (u32)code->tasks[4 * i + 1])].has_task = 1;
    }
}

static Engine *new_band(const Engine *first) {
    Engine *e = calloc(1, sizeof(Engine));
    if (!e) return NULL;
    if (first) *e = *first;
    e->free_run = e->free_operation = NIL;
    e->now = -1;
    for (int i = 0; i < 3; i++)
        if (!(e->scratch[i] = malloc(4 * (2 * MAX_LENGTH + 8)))) return NULL;
    return e;
}

/* Two bands if asked for: the border routers are those of the rows next to the split. */
static int split_bands(Engine *e, i32 num_bands) {
    e->bands[0] = e;
    e->num_bands = 1;
    if (num_bands < 2 || e->height < 4) return 1;
    i32 row = e->height / 2;
    Engine *second = new_band(e);
    if (!second) return 0;
    for (u32 i = 0; i < e->num_nodes; i++) {
        Node *node = e->nodes + i;
        i32 y = (i32)node->pe / e->width;
        node->border = node->kind == NODE_ROUTER && (y == row || y == row - 1);
    }
    Engine *bands[MAX_BANDS] = {e, second};
    for (int i = 0; i < MAX_BANDS; i++) {
        memcpy(bands[i]->bands, bands, sizeof bands);
        bands[i]->num_bands = MAX_BANDS;
        bands[i]->split = e->sites[row * e->width].first_node;
    }
    return 1;
}

static void *new_records(size_t size, size_t count) {
    return with_large_pages(aligned_alloc(size, size * count), size * count);
}

Engine *engine_new(i32 width, i32 height, const Costs *costs, Program *programs, Route *routes, const i16 *program_of,
                   const i64 *memory_of, const i16 *route_of, i32 num_colours, i64 num_nodes, u8 *memory, i32 *registers,
                   i32 max_cycles, i32 tracing, i32 num_bands) {
    Engine *e = new_band(NULL);
    if (!e) return NULL;
    e->width = width;
    e->height = height;
    e->num_pes = width * height;
    e->costs = *costs;
    e->programs = programs;
    e->routes = routes;
    e->memory = memory;
    e->registers = registers;
    e->max_cycles = max_cycles;
    e->tracing = tracing;
    e->nodes = new_records(sizeof(Node), (size_t)(num_nodes ? num_nodes : 1));
    e->sites = new_records(sizeof(Site), (size_t)e->num_pes);
    e->pes = new_records(sizeof(Pe), (size_t)e->num_pes);
    if (tracing) e->task_started = calloc((size_t)e->num_pes * 2, sizeof(i32));
    if (!e->nodes || !e->sites || !e->pes || (tracing && !e->task_started)) return NULL;
    for (i32 pe = 0; pe < e->num_pes; pe++) {
        add_pe(e, (u32)pe, program_of[pe], memory_of[pe], route_of, num_colours);
        mark_shared(e, e->sites + pe);
    }
    if (!split_bands(e, num_bands)) return NULL;
    for (u32 i = 0; i < e->num_bands; i++) /* only pages that are used take memory */
        if (!(e->bands[i]->operations = new_records(sizeof(Operation), (size_t)e->num_pes * NUM_THREADS))) return NULL;
    for (i32 pe = 0; pe < e->num_pes; pe++)
        if (program_of[pe] >= 0) schedule(owner_of_pe(e, (u32)pe), ID_PE | (u32)pe, 0);
    return e;
}

static void free_band(Engine *e) {
    for (u32 i = 0; i < e->num_operations; i++) {
        Operation *op = e->operations + i;
        if (op->pe != NIL) {
            forget_streams(op);
        }
        free(op->pieces);
    }
    free_events(e);
    for (int i = 0; i < MAX_COLOURS; i++) free(e->fresh[i].ids);
    for (int i = 0; i < 3; i++) free(e->scratch[i]);
    free(e->runs), free(e->operations), free(e->candidates), free(e->border), free(e->border_starters);
    free(e->starters), free(e->ready_pes), free(e->spans), free(e);
}

void engine_free(Engine *e) {
    for (u32 i = 0; i < e->num_nodes; i++)
        while (e->nodes[i].head != NIL) pop_run(owner(e, i), e->nodes + i);
    Node *nodes = e->nodes;
    Site *sites = e->sites;
    Pe *pes = e->pes; /* streams that are released with the bands' operations are lent by them */
    free(e->task_started);
    for (u32 i = e->num_bands; i-- > 0;) free_band(e->bands[i]);
    free(nodes), free(sites), free(pes);
}

/* fault, PE, cycle, detail, now, events, link words, stalls for room, link, words, last event in a core, spans, and
 * those that were lost; of a deadlock also: whether words are lacking (or room), words still to move, other PEs, the
 * first of them. */
void engine_status(const Engine *e, i64 *out) {
    i64 values[17] = {e->fault, e->fault_pe, e->fault_cycle, e->fault_detail, e->now};
    values[13] = e->stuck.lacks_words, values[14] = e->stuck.num_words;
    values[15] = e->stuck.num_others, values[16] = e->stuck.other;
    for (i32 pe = 0; pe < e->num_pes; pe++)
        if (e->pes[pe].last_event > values[10]) values[10] = e->pes[pe].last_event;
    for (u32 i = 0; i < e->num_bands; i++) {
        const Engine *band = e->bands[i];
        values[5] += band->events;
        values[6] += band->link_words;
        for (int cause = WAIT_ROOM; cause <= WAIT_WORDS; cause++) values[6 + cause] += band->stalls[cause];
        values[11] += band->num_spans;
        values[12] += band->num_lost_spans;
    }
    memcpy(out, values, sizeof values);
}

void engine_per_pe(const Engine *e, i64 *busy, i64 *hops) {
    for (i32 pe = 0; pe < e->num_pes; pe++) busy[pe] = e->pes[pe].busy, hops[pe] = e->sites[pe].hops;
}

void engine_spans(const Engine *e, i32 *out) {
    for (u32 i = 0; i < e->num_bands; i++) {
        if (e->bands[i]->num_spans) memcpy(out, e->bands[i]->spans, sizeof(Span) * e->bands[i]->num_spans);
        out += 4 * (size_t)e->bands[i]->num_spans;
    }
}
