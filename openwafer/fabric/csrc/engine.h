/* The fast machine. It computes what reference.py computes, but flow by flow: a stream that moves one word per cycle
 * costs an event when it starts, when it stops and when its words change owner, however long it is.
 *
 * A mover (a router's queue, a core's output queue, or a running fabric instruction) is either firing, one word in
 * every cycle, or not. It is evaluated at the cycles in which that may change; evaluating it once too often is
 * harmless. Values travel apart from time: a stream holds all the words of a send from its first cycle on, and runs
 * in the queues point into it.
 */
#ifndef OPENWAFER_ENGINE_H
#define OPENWAFER_ENGINE_H
#include <stdint.h>
#include <stddef.h>

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;
typedef int16_t i16;
typedef int32_t i32;
typedef int64_t i64;

enum { INSTRUCTION_WORDS = 24, NUM_THREADS = 9, MAIN_THREAD = 8, MAX_POSITIONS = 4, MAX_LENGTH = 48 * 1024,
       MAX_COLOURS = 32 };
enum { NORTH, EAST, SOUTH, WEST, RAMP, RAMP_IN };
enum { NODE_ROUTER, NODE_OUTPUT, NODE_INPUT };
enum { KIND_NONE, KIND_MEM, KIND_FABRIC, KIND_REG };
enum { F_OP = 0, F_DTYPE = 1, F_LENGTH = 2, F_LENGTH_REG = 3, F_DST = 4, F_A = 8, F_B = 12, F_THREAD = 16, F_THEN = 17,
       F_IMM = 18, F_N = 19, F_K = 20, F_TARGET = 21, F_SKIP_ZEROS = 22 };
enum { OP_MOV, OP_ADD, OP_SUB, OP_MUL, OP_MAX, OP_MAC, OP_EXP, OP_RSQRT, OP_RECIP, OP_CONVERT, OP_SUM, OP_DOT, OP_MAXOF,
       OP_TILE, OP_CONTROL, OP_SET, OP_IADD, OP_IMUL, OP_FADD, OP_FMUL, OP_FMAX, OP_FEXP, OP_FRSQRT, OP_FRECIP, OP_LOAD,
       OP_STORE, OP_UNPACK, OP_LOOP, OP_ENDLOOP, OP_BRANCH, OP_ACTIVATE, OP_BLOCK, OP_UNBLOCK, OP_END, OP_WAIT, OP_ILT, OP_IEQ, OP_ADVANCE };
enum { T_F32, T_F16, T_BF16, T_I32, T_I16 };
enum { FAULT_NONE, FAULT_COLLISION, FAULT_OUT_OF_BOUNDS, FAULT_QUEUE_BUSY, FAULT_THREAD_BUSY, FAULT_DEADLOCK,
       FAULT_STRANDED, FAULT_CYCLE_LIMIT, FAULT_NO_MEMORY };
enum { WAIT_NONE, WAIT_ROOM, WAIT_LINK, WAIT_WORDS };

#define NIL 0xFFFFFFFFu
#define NEVER INT32_MAX
#define OPEN (-1)
/* What an event or a feeder names: a node, an operation or a PE, told apart by the top bits. */
#define ID_OPERATION 0x40000000u
#define ID_PE 0x80000000u
#define ID_INDEX 0x3FFFFFFFu
#define ID_KIND 0xC0000000u

/* All the words of one send, shared by every queue they pass through. */
enum { STREAM_WORDS, STREAM_MEMORY, STREAM_DERIVED };
enum { MIN_LOAN = 16 };       /* fewer words are copied at once */
typedef struct Stream {
    u32 refs, size;
    u8 kind, control, bytes, depth; /* bytes: per element in memory; depth: derived streams in a row up to this */
    union {
        u32 *words;           /* STREAM_WORDS */
        struct {              /* STREAM_MEMORY */
            const u8 *memory;
            struct Stream *next, **link; /* loans of the same PE; no link: a copy of its own */
        };
        struct {              /* STREAM_DERIVED: what the instruction makes of another stream */
            const i32 *row;
            struct Stream *in, *operand;
            u32 in_offset, operand_offset;
        };
    };
    u32 own[];
} Stream;

/* Consecutive words of a stream in a queue: word i arrives in cycle `arrives + i`. OPEN while still being fed. */
typedef struct {
    Stream *stream;
    u32 offset, next;
    i32 arrives, count;
} Run;

typedef struct {
    u32 pe, route, feeder, operation;
    u32 head, tail;           /* runs */
    i32 taken, fire_start;    /* words taken from the head run before fire_start */
    i32 reference, waits_since;
    union {
        i32 advance_at;       /* of a router's switch */
        i32 drained_at;       /* of an input queue: when the instruction that fires from it will have all its words */
    };
    i16 occupied, capacity;   /* words at the start of cycle `reference` */
    u8 colour, kind, position, links;
    u8 fed, firing, blocked, shared; /* blocked: sides whose feeder waits for room here; shared: contended links */
    u8 cause, has_task, border; /* border: a router next to the other band */
    i32 joined;               /* words that the run being fed had before it was fed again */
} __attribute__((aligned(64))) Node; /* a cache line: most events touch one node, its head run and a neighbour */

typedef struct {
    u32 pe, input, output;    /* nodes or NIL */
    const i32 *row;
    i32 start, remaining, fire_start, done_at, length, waits_since;
    u32 taken;                /* words moved before fire_start */
    u8 thread, firing, cause;
    i32 low, high;            /* bytes it will write */
    union {
        struct {              /* a sender's current output stream, and which input word its first word came from */
            Stream *out, *in;
            u32 in_base, out_base;
        };
        Run piece;            /* a receiver's first words: stream, offset, count */
    };
    u32 num_pieces, room_pieces;
    Stream *operand;          /* as it was at issue: lent memory, or elements as fp32 or int32 */
    Run *pieces;              /* the second and later pieces */
    u32 next_free;
} __attribute__((aligned(128))) Operation;

/* The router of a PE: where its nodes are, and its links. Apart from the core, because neighbours look here. */
typedef struct {
    u32 first_node, routers, outputs, inputs; /* masks of colours; nodes lie in this order */
    u32 waiting_routers, waiting_outputs;     /* colours that wait for a link */
    u32 hops, links;                          /* links: in use */
} Site;

typedef struct {
    i64 memory;
    i32 program, pc, ready_at, last_event;
    u32 activated, blocked;
    u8 registers_pending, waits_for;          /* waits_for: thread, or NUM_THREADS */
    u16 running, finished, receiving;         /* masks of threads; finished: perhaps done in this cycle */
    i64 busy;
    Stream *loans;                            /* streams whose words are in this PE's memory */
    u32 threads[NUM_THREADS];                 /* operations, or NIL */
} __attribute__((aligned(128))) Pe;

typedef struct {
    u16 num_positions, ring;
    u8 inputs[MAX_POSITIONS], outputs[MAX_POSITIONS];
} Route;

typedef struct {
    const i32 *code;
    i32 num_instructions, num_tasks, memory_bytes;
    const i32 *tasks;         /* num_tasks x (entry, colour or -1, register, start) */
    const i32 *input_words, *output_words; /* 24 capacities, 0: not bound */
    const i32 *next_tile;     /* per instruction: the next TILE from there on, or -1 */
} Program;

/* Filled by engine.py; the order is the contract. */
typedef struct {
    i32 vector_startup, vector_minimum, vector_overlap, group_cycles_16, simd_16, write_buffer_16, fabric_startup,
        task_start, scalar, divide;
    i32 ramp_cycles, router_words, num_banks, bank_bytes, num_registers, loop_inner, loop_outer,
        hop_cycles, forward_latency;
} Costs;

typedef struct {
    i32 pe, kind, start, end; /* kind: task number, or 100 + thread */
} Span;

enum { WHEEL = 4096, CHUNK = 125, MAX_BANDS = 2 };

/* Events of one cycle, in the order in which they were scheduled. Chunks go from cycle to cycle: memory for events is
 * as much as are pending, not as many as every slot of the wheel ever held. */
typedef struct Chunk {
    struct Chunk *next;
    u32 count, ids[CHUNK];
} Chunk;

typedef struct {
    Chunk *first, *last;
} Bucket;

typedef struct {
    i32 since;
    u32 colour, id;
} Candidate;

typedef struct {
    u32 *ids, count, room;
} Ids;

/* One band of rows of the mesh, worked on by one thread. What lies in arrays of nodes and PEs is shared; queues of
 * events, runs and operations belong to a band. Threads work apart on everything but the routers of the two rows at
 * the border; those are left to thread 0, between barriers. */
typedef struct Engine {
    struct Engine *bands[MAX_BANDS];
    u32 num_bands, split;     /* first node of the second band */
    i32 next;                 /* time of this band's next event */
    u32 *border;              /* ids, then starters, of border routers in this cycle */
    u32 num_border, room_border;
    Candidate *border_starters;
    u32 num_border_starters, room_border_starters;
    i32 width, height, num_pes;
    u32 num_nodes;
    Node *nodes;
    Site *sites;
    Pe *pes;
    Program *programs;
    Route *routes;
    Costs costs;
    u8 *memory;
    i32 *registers;
    Run *runs;
    u32 num_runs, room_runs, free_run;
    Operation *operations;
    u32 num_operations, free_operation;
    Bucket wheel[WHEEL];
    Chunk *free_chunk;
    u64 occupied[WHEEL / 64];
    u32 *present;             /* events of this cycle */
    u32 num_present, room_present;
    u64 *heap;                /* events beyond the wheel: time << 32 | id */
    u32 heap_count, heap_room;
    i32 now, max_cycles;
    Ids fresh[MAX_COLOURS];   /* starters that share links and have not waited yet */
    Candidate *candidates;    /* and those that have */
    u32 num_candidates, room_candidates;
    u32 *starters;
    u32 num_starters, room_starters;
    u32 *ready_pes;
    u32 num_ready, room_ready;
    i32 fault, fault_pe, fault_cycle, fault_detail;
    struct {
        i32 lacks_words, num_words, num_others, other;
    } stuck;                  /* of a deadlock */
    i32 last_event;
    i64 link_words, events, stalls[4];
    float *scratch[3];
    Span *spans;
    u32 num_spans, room_spans;
    i64 num_lost_spans;       /* that there was no room for */
    i32 tracing;              /* the most spans to keep, 0: none */
    i32 *task_started;        /* per PE, only while tracing */
} Engine;

/* engine.c */
void fail(Engine *e, i32 fault, u32 pe, i32 cycle, i32 detail);
void *grow(Engine *e, void *items, u32 *room, u32 needed, size_t size);
void *allocate(Engine *e, size_t size);
void add_span(Engine *e, u32 pe, i32 kind, i32 start, i32 end);
static inline Engine *owner(Engine *e, u32 node) { return e->num_bands == 1 ? e : e->bands[node >= e->split]; }
static inline Engine *owner_of_pe(Engine *e, u32 pe) { return owner(e, e->sites[pe].first_node); }
/* wheel.c */
void schedule(Engine *e, u32 id, i32 time);
i32 next_event(const Engine *e);
void take_events(Engine *e, i32 t);
void free_events(Engine *e);
/* ahead.c */
void ask_record(const void *address, size_t size);
void look_ahead(const Engine *e, const u32 *ids, u32 count, u32 i);
void look_ahead_pe(Engine *e, const u32 *pes, u32 count, u32 i);
/* queue.c */
u32 node_of(const Engine *e, u32 pe, u32 kind, u32 colour);
void settle(Node *node, i32 t);
void pop_run(Engine *e, Node *node);
void wake_feeders(Engine *e, Node *node, i32 time);
u32 target_of(const Engine *e, const Node *node, int direction);
i32 occupied_at(const Node *node, i32 t);
int position_at(const Engine *e, Node *node, i32 t);
int target_free(Engine *e, u32 id, Node *target, int side, i32 t);
int targets_free(Engine *e, u32 id, const Node *node, u8 links, i32 t);
void schedule_full(Engine *e, u32 feeder, const Node *target, i32 t);
void feed_open(Engine *e, u32 index, u32 feeder, Stream *stream, u32 offset, i32 arrives, i32 t);
void feed_close(Engine *e, u32 index, i32 count, i32 t);
void add_starter(Engine *e, u32 id);
void schedule_fill(Engine *e, const Node *node, i32 t);
/* stream.c */
Stream *new_stream(Engine *e, u32 size);
Stream *lend(Engine *e, u32 pe, i32 address, i32 dtype, u32 size);
Stream *derive(Engine *e, const i32 *row, Stream *in, u32 in_offset, Stream *operand, u32 operand_offset, u32 size);
void retain(Stream *stream);
void release(Stream *stream);
void keep_words(Engine *e, Stream *stream);
void before_write(Engine *e, u32 pe, const u8 *low, const u8 *high);
void read_words(Engine *e, Stream *stream, u32 first, u32 count, u32 *to);
u32 read_word(Engine *e, Stream *stream, u32 index);
/* transfer.c */
void continue_operation(Engine *e, u32 id, i32 t);
void start_operation(Engine *e, u32 id, i32 t);
int receive_at(Engine *e, Node *node, i32 arrives, i32 t);
/* flow.c */
void stop_movers(Engine *e, i32 t);
void stop_border(Engine *e, i32 t);
void start_movers(Engine *e, i32 t);
void start_border(Engine *e, i32 t);
void advance_switch(Engine *e, u32 index, i32 t);
/* core.c */
enum { READY_NONE = -1 }; /* ready_at of a main thread that waits for a task or for its fabric instruction */
void step_pe(Engine *e, u32 pe, i32 t);
/* operand.c */
i32 *registers_of(Engine *e, u32 pe);
float float_of(i32 bits);
i32 bits_of(float value);
i32 length_of(Engine *e, u32 pe, const i32 *row);
i32 address_of(Engine *e, u32 pe, const i32 *row, int field);
int range_of(Engine *e, u32 pe, const i32 *row, int field, i32 length, i32 dtype, i64 *low, i64 *high);
u8 *memory_of(Engine *e, u32 pe, i32 address);
void load_operand(Engine *e, u32 pe, const i32 *row, int field, i32 length, i32 dtype, float *to);
int check_operands(Engine *e, u32 pe, const i32 *row, i32 length, int *overlaps);
void free_target(Engine *e, u32 pe, const i32 *row, i32 length, i32 dtype);
void finish(Engine *e, u32 pe, const i32 *row, i32 length, float *a, float *b);
i32 run_vector(Engine *e, u32 pe, const i32 *row, i32 length);
static inline Run *piece_of(Operation *op, u32 index) { return index ? op->pieces + index - 1 : &op->piece; }
/* operation.c */
void forget_streams(Operation *op);
Stream *forward_stream(Engine *e, Operation *op, Stream *in, u32 offset, u32 count, u32 first);
int issue(Engine *e, u32 pe, const i32 *row, i32 length, int inside, i32 now, i32 t);
void later(Engine *e, u32 pe, Pe *p, i32 now);
void complete(Engine *e, Pe *p, u32 thread, i32 t);
/* values.c */
u32 type_bytes(i32 dtype);
void load_elements(i32 dtype, const u8 *from, i32 stride, i32 count, float *to);
void store_elements(i32 dtype, u8 *to, i32 stride, i32 count, const float *from);
void words_to_elements(i32 dtype, const u32 *from, i32 count, float *to);
void elements_to_words(i32 dtype, u32 *to, i32 count, const float *from);
void compute(i32 op, i32 dtype, i32 count, const float *a, const float *b, const float *dst, float *out);
float reduce(i32 op, i32 dtype, float total, i32 count, const float *a, const float *b);
void convert(i32 from, i32 to, i32 count, float *values);
void tile(i32 dtype, u8 *c, const u8 *a, const u8 *b, i32 m, i32 n, i32 k);
float half_to_float(u16 bits);
float slow_function(i32 op, float x);
/* cost.c */
i32 vector_cost(const Costs *costs, const i32 *row, i32 length, const i32 *addresses);
i32 tile_cost(const Costs *costs, i32 dtype, i32 m, i32 n, i32 k, i32 outer_n);
#endif
