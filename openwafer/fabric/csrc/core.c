/* Cores: tasks and the main thread. The rules are those of core.py. */
#include "engine.h"

static i32 scalar_step(Engine *e, u32 pe, Pe *p, const i32 *row) {
    i32 *r = registers_of(e, pe), *dst = r + row[F_DST + 1], imm = row[F_IMM], op = row[F_OP];
    i32 a = row[F_A] == KIND_REG ? r[row[F_A + 1]] : 0; /* of LOAD it is an address */
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
        free_target(e, pe, row, 1, row[F_DTYPE]);
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
                    registers_of(e, pe)[task[2]] = (i32)read_word(e, run->stream, run->offset + (u32)node->taken);
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

/* Instructions over registers and the program counter. */
#define BIT(op) (1ull << (op))
static const u64 PLAIN = BIT(OP_SET) | BIT(OP_IADD) | BIT(OP_IMUL) | BIT(OP_FADD) | BIT(OP_FMUL) | BIT(OP_FMAX) |
                         BIT(OP_UNPACK) | BIT(OP_LOOP) | BIT(OP_ENDLOOP) | BIT(OP_BRANCH) | BIT(OP_ACTIVATE) |
                         BIT(OP_BLOCK) | BIT(OP_UNBLOCK) | BIT(OP_ILT) | BIT(OP_IEQ);

/* One instruction at local time `now`; returns its cycles, or -1 if it has to wait for its own cycle or is issued. */
static i32 execute(Engine *e, u32 pe, Pe *p, const i32 *row, i32 now, i32 t) {
    int overlaps;
    i32 op = row[F_OP];
    if (PLAIN >> op & 1 && !p->registers_pending) { /* registers only: nothing can go wrong and nobody can interfere */
        p->last_event = now;
        p->pc++;
        i32 cycles = scalar_step(e, pe, p, row);
        p->busy += cycles;
        return cycles;
    }
    i32 length = op <= OP_CONTROL ? length_of(e, pe, row) : row[F_LENGTH];
    int fabric = row[F_DST] == KIND_FABRIC || row[F_A] == KIND_FABRIC || row[F_B] == KIND_FABRIC;
    int is_long = op <= OP_CONTROL && length > MAX_LENGTH; /* the length of a loop is its count */
    int inside = check_operands(e, pe, row, length, &overlaps) && !is_long;
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
    for (u32 rest = p->finished; rest; rest &= rest - 1) {
        u32 thread = (u32)__builtin_ctz(rest);
        if (e->operations[p->threads[thread]].done_at == t) complete(e, p, thread, t);
    }
    if (p->ready_at == READY_NONE && p->pc < 0) p->ready_at = t; /* idle: look for a task */
    if (p->ready_at != t) return;
    const Program *program = e->programs + p->program;
    i32 now = t;
    for (;;) {
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
